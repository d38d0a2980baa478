"""Sub-calls: one scheduler for the tree of runs, and the models that it asks.

    endpoint      what a model is to the scheduler, and its errors
    openai_http   any OpenAI-compatible server
    wire          what such a server is sent and sends, as types; its errors as sentences
    sse           server-sent events, for replies that are streamed
    fleet         several servers of one model as one endpoint
    member        one of them: what it is sent, and whether it may be sent anything now
    keeper        asks for their health and their queues
    journey       the way of a call through them
    adaptive      how many requests a server is worth sending at once
    embedded      the small model that comes with rlm-kernel, in a process of its own
    model_file    its file: got once, checked, cached
    scheduler     limits, retries, budget and events of every call
    batch         calls that were asked for together, and what became of each
    pool          workers that do the calls, so many at once
    fair_queue    whose turn it is

Nothing here knows a REPL: prompts come in as text, outcomes go out through a
callable. All of it runs in the kernel process, in one event loop.
"""
