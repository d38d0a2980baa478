"""What is called when, and what becomes of it.

scheduler     the queue, limits and lanes of a tree of runs
batch         calls that were asked for together, and what became of each
caller        one call, from its turn to its end
deadlines     when a call has taken long enough
retry         whether and when a request that failed is sent again
tools         tools for the model of a call, round by round
cache         recorded replies, served again
pool          workers that do the calls, so many at once
fair_queue    whose turn it is
"""
