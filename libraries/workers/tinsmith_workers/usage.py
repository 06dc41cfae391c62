"""What a worker and its host use: read in a thread beside the calls, and sent along with an answer."""

import logging
import threading
from typing import Final

from tinsmith.figures import HostReport
from tinsmith.host_usage import Gpus, usage_of_host

_EVERY_S: Final = 5.0

logger = logging.getLogger(__name__)


class Usage:
    """Belongs to one worker. `of_host`: whether this worker tells of the GPUs and the network of its host."""

    def __init__(self, *, of_host: bool) -> None:
        self._of_host = of_host
        self._unsent: HostReport | None = None
        threading.Thread(target=self._run, name="usage", daemon=True).start()

    def take(self) -> HostReport | None:
        """Return what was read since the last call, if anything was."""
        found, self._unsent = self._unsent, None
        return found

    def _run(self) -> None:
        gpus = Gpus() if self._of_host else None
        pause = threading.Event()  # which nobody sets: the process ends
        while True:
            try:
                self._unsent = usage_of_host(() if gpus is None else gpus.read(), with_network=self._of_host)
            except Exception:
                logger.exception("what this worker uses cannot be read; trying again in %g s", _EVERY_S)
            pause.wait(_EVERY_S)
