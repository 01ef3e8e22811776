"""Lets vLLM's NixlConnector serve from a few cores of a CPU; vLLM itself stays as it is.

Python imports this first in every process of an engine, which runs in its own environment. With
PEER_KEEP_CORES=0,1 the process stays on these cores whatever it asks for, and NIXL has no progress thread.
"""

import functools
import os

if "PEER_KEEP_CORES" in os.environ:
    import nixl_cu13._api as api

    _cores = [int(core) for core in os.environ["PEER_KEEP_CORES"].split(",")]
    _set_affinity = os.sched_setaffinity
    os.sched_setaffinity = lambda pid, _: _set_affinity(pid, _cores)
    api.nixl_agent_config = functools.partial(  # type: ignore[misc, assignment]
        api.nixl_agent_config, enable_prog_thread=False
    )
