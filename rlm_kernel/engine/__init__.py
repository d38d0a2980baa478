"""The engine: a run as a state machine, and what proposes its cells. It knows no Jupyter.

    run            the state machine: propose, decide, execute, observe, end
    decisions      the one pause point: proposals, decisions, policies
    conversation   messages between run and root, within budget and context
    compaction     what gives way when the root's context is nearly full
    replies        a reply as it streams in, cut where its cell ends
    proposals      from a reply to a cell
    fences         fenced code in text; `pytext` helps it with unfinished Python
    observation    from the result of a cell to what the root is shown of it
    dialects       names, prompts and texts that a root is talked to with
    roots          `ChatRoot`, `HumanRoot`, `PlaybookRoot`; `root_protocol` is what they share
    budget         limits over the tree of runs, reserved before and settled after each call
    events         every fact, as a type
    stopping       how a run is ended from outside

Nothing is imported here: the worker and the start of the kernel import parts
of this package and are not to pay for the rest.
"""
