"""Sub-calls: one scheduler for the tree of runs, and the models that it asks.

    endpoint      what a model is to the scheduler, and its errors

What is done when:

    scheduler     limits, retries, budget and events of every call
    batch         calls that were asked for together, and what became of each
    caller        one call, from its turn to its end
    deadlines     when a call has taken long enough
    retry         whether and when a request that failed is sent again
    tools         tools for the model of a call, round by round
    cache         recorded replies, served again
    pool          workers that do the calls, so many at once
    fair_queue    whose turn it is

One server:

    openai_http   any OpenAI-compatible server as an endpoint
    connection    HTTP to it
    server_kind   what it is, as far as it says so, and how much it can do at once
    prometheus    the format in which it tells the latter
    context       whether a prompt fits, before it is sent
    wire          what it is sent and sends, as types
    tool_wire     the part of that which is about tools
    structured    the part which is about typed replies
    replies       what a completion is worth
    refusals      its errors as sentences, without keys
    sse           server-sent events, for replies that are streamed

Several servers:

    fleet         servers of one model as one endpoint
    member        one of them: what it is sent, and whether it may be sent anything now
    keeper        asks for their health and their queues
    journey       the way of a call through them
    adaptive      how many requests a server is worth sending at once
    vllm          vLLM servers on this machine: started, listed, found and stopped

The model that comes with rlm-kernel:

    embedded      as an endpoint, in a process of its own
    embedded_server  what runs in that process
    model_file    its file: got once, checked, cached

Nothing here knows a REPL: prompts come in as text, outcomes go out through a
callable. But for what `vllm` starts and stops, and for embedded_server, all of
it runs in the kernel process, in one event loop.
"""
