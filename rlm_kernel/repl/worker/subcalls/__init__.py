"""``sub_RLM`` and its kin: calls of a model from code in a cell.

The worker only asks: models are called by the kernel, which holds the keys,
the budget and the record. What the worker adds is on its own side of the
link: prompts made from templates, and replies read as typed values.

=============  ==========================================================
`sub_rlm`      ``sub_RLM``, its ``aio``, ``map`` and ``last``
`aliases`      the names under which other systems know it
`subtask`      ``@subtask``
`options`      what a call may be given, checked
`prompts`      prompts, checked and cut into messages
`templates`    one prompt for each item
`calls`        asking the kernel, and what came of the last batch
`rejected`     replies that are asked for again, and in what words
`outcomes`     what has come, also after an interrupt
`forms`        the value that a reply is to be: read, validated, checked
`schemas`      forms of Python types and JSON Schemas
`replies`      finding a value in what a model wrote
=============  ==========================================================
"""

from rlm_kernel.repl.worker.subcalls.aliases import make_aliases
from rlm_kernel.repl.worker.subcalls.calls import Calls
from rlm_kernel.repl.worker.subcalls.sub_rlm import SubRLM
from rlm_kernel.repl.worker.subcalls.subtask import make_subtask

__all__ = ["Calls", "SubRLM", "make_aliases", "make_subtask"]
