"""Sub-calls: one scheduler for the tree of runs, and the models that it asks.

    endpoint      what a model is to the scheduler, and its errors
    scheduling    what is called when: limits, budget, retries, cache, events
    server        one OpenAI-compatible server as an endpoint
    fleet         several servers of one model as an endpoint
    embedded      the model that comes with rlm-kernel
    vllm          vLLM servers on this machine: started, listed, found and stopped

Nothing here knows a REPL: prompts come in as text, outcomes go out through a
callable. But for what `vllm` starts and stops, and for the process of the
embedded model, all of it runs in the kernel process, in one event loop.
"""
