"""Comms: widgets in the REPL talk to the front end through the kernel.

ipywidgets and others reach comms through the package ``comm`` and through
``get_ipython().kernel``; both are stood in for here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlm_kernel.repl import messages
from rlm_kernel.repl.worker.link import Link
from rlm_kernel.repl.worker.streams import Outlet

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Comms", "KernelStandIn"]


class KernelStandIn:
    """What libraries ask of ``get_ipython().kernel``.

    Parameters
    ----------
    shell
        The REPL's.
    comms
        Its comms.
    """

    def __init__(self, shell: InteractiveShell, comms: Comms) -> None:
        self.shell = shell
        self._comms = comms
        self._parent: dict[str, Any] = {}

    @property
    def comm_manager(self) -> Any:
        """The comm manager, which ``comm.get_comm_manager()`` returns too."""
        return self._comms.manager

    def set_parent(self, header: dict[str, Any]) -> None:
        """From now on *header* is that of the request being worked on."""
        self._parent = header if "header" in header else {"header": header}

    def get_parent(self, channel: str | None = None) -> dict[str, Any]:
        """The Jupyter message being worked on; its header at least."""
        return self._parent or {"header": {}}

    @property
    def parent_header(self) -> dict[str, Any]:
        """As `get_parent`, under an older name."""
        return self.get_parent()

    _parent_header = parent_header


class Comms:
    """Carries comm messages over the link, in both directions."""

    def __init__(self, link: Link, outlet: Outlet) -> None:
        self._link = link
        self._outlet = outlet
        self._manager: Any = None

    def install(self) -> None:
        """Stand in for the functions of the package ``comm``."""
        import comm

        comm.create_comm = self._create
        comm.get_comm_manager = lambda: self.manager

    @property
    def manager(self) -> Any:
        """The one comm manager of this process."""
        if self._manager is None:
            from comm.base_comm import CommManager

            self._manager = CommManager()
        return self._manager

    def _create(self, *args: Any, **kwargs: Any) -> Any:
        from comm.base_comm import BaseComm

        carry = self._carry

        class LinkComm(BaseComm):
            def publish_msg(
                self,
                msg_type: Any,
                data: Any = None,
                metadata: Any = None,
                buffers: Any = None,
                **keys: Any,
            ) -> None:
                carry(self.comm_id, msg_type, data, metadata, buffers, **keys)

        return LinkComm(*args, **kwargs)

    def _carry(
        self,
        comm_id: str,
        kind: Any,
        data: Any,
        metadata: Any,
        buffers: Iterable[Any] | None,
        target_name: str = "",
        target_module: str | None = None,
        **_: Any,
    ) -> None:
        message = messages.CommFromWorker(
            kind=kind,
            cell=self._outlet.cell,
            comm_id=comm_id,
            data={} if data is None else data,
            target_name=target_name,
            target_module=target_module,
            metadata=metadata or {},
            buffers=[bytes(buffer) for buffer in buffers or ()],
        )
        self._link.send(message)

    def receive(self, message: messages.CommToWorker) -> None:
        """Hand a front end's message to its comm; an error in its handler is logged there.

        One for a comm or a target that is not known here is common after a restart and is no
        news to a person: the comm manager would log it, which shows it in a cell.
        """
        if message.kind == "comm_open":
            if message.target_name not in self.manager.targets:
                self._carry(message.comm_id, "comm_close", None, None, None)
                return
        elif message.comm_id not in self.manager.comms:
            return
        content = {
            "comm_id": message.comm_id,
            "data": message.data,
            "target_name": message.target_name,
        }
        envelope = {
            "header": {"msg_type": message.kind},
            "parent_header": message.parent,
            "metadata": message.metadata,
            "content": content,
            "buffers": [memoryview(buffer) for buffer in message.buffers],
        }
        getattr(self.manager, message.kind)(None, None, envelope)
