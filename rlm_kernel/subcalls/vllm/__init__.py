"""Local vLLM servers: started, listed, found and stopped.

A server is started by ``jupyter rlm serve`` in a session of its own and goes on without it. What
is known of it lies in a file of the registry, which kernels read to find it.
"""

from __future__ import annotations
