"""Sub-calls: one scheduler for the tree of runs, and the models that it asks.

    endpoint      what a model is to the scheduler, and its errors
    openai_http   any OpenAI-compatible server
    wire          what such a server is sent and sends, as types; its errors as sentences
    embedded      the small model that comes with rlm-kernel
    model_file    its file: got once, checked, cached
    endpoints     from a spec to an endpoint; which names a cell may ask for
    scheduler     queue, limits, retries, budget, events
    fair_queue    whose turn it is

Nothing here knows a REPL: prompts come in as text, outcomes go out through a
callable. All of it runs in the kernel process, in one event loop.
"""
