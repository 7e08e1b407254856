"""The process that runs cases under a time limit, so that a crash, a hang or an unusable device ends one case only."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import traceback
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

from gpu_rows.rows import Card, Case, Context, Row
from hpnlp import measure

START_LIMIT = 120  # seconds in which a process imports the library, finds the device and measures its rates


class DeviceError(Exception):
    """The process of the cases found no device."""


def work(connection: Connection, rehearse: bool, card: Card | None, cache: str) -> None:
    """Sends the environment and the rates of the card, then the records of each case whose name it receives."""
    import jax

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        connection.send(("no device", str(error).splitlines()[0]))
        return
    if platform != ("cpu" if rehearse else "gpu"):
        connection.send(("no device", f"JAX runs on {platform}"))
        return
    from gpu_rows.card import rates
    from gpu_rows.table import case_of

    card = card or rates(Context(rehearse))
    connection.send(("ready", (measure.environment() | torch_version(), card)))
    while True:
        try:
            row, name, differing = connection.recv()
        except EOFError:  # the command has ended
            return
        try:
            records = case_of(row, name).run(Context(rehearse, card, differing))
        except Exception:  # a device that is not known may raise anything
            connection.send(("failed", traceback.format_exc()))
        else:
            connection.send(("measured", records))
        jax.clear_caches()  # compiled programs hold device memory


def torch_version() -> dict[str, str]:
    """The version of torch, if it is installed."""
    try:
        return {"torch": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        return {}


@dataclasses.dataclass
class Worker:
    """The process, started when it is needed, and again after a failure.

    Attributes:
      rehearse: Whether cases are tiny and run on a CPU.
      cache: Directory of compiled programs.
      environment: Environment of the measurements, once a process has started.
      card: Rates of the device, once a process has started.
    """

    rehearse: bool
    cache: str
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    card: Card | None = None
    _process: Any = None
    _connection: Any = None
    _alone: bool = False
    _ready: bool = False

    def launch(self, alone: bool) -> None:
        """Starts a process, unless one runs that gives arrays as much memory.

        Args:
          alone: Whether JAX takes most of the device's memory at once. Otherwise it leaves room for torch.
        """
        if self._process is not None and self._alone == alone:
            return
        self.stop()
        os.environ["JAX_PLATFORMS"] = "cpu" if self.rehearse else "cuda,cpu"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(alone).lower()
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"
        if self.rehearse:  # programs run once, and compiling them takes most of the time
            os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
            if metadata.version("jaxlib").startswith("0.10."):  # later releases always use the slower emitters
                os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
        context = multiprocessing.get_context("spawn")
        self._connection, end = context.Pipe()
        self._process = context.Process(target=work, args=(end, self.rehearse, self.card, self.cache), daemon=True)
        self._process.start()
        end.close()
        self._alone, self._ready = alone, False

    def wait(self) -> None:
        """Waits until the process has found the device.

        Raises:
          DeviceError: There is no device.
        """
        if not self._ready:
            kind, content = self._receive(START_LIMIT)
            if kind != "ready":
                raise DeviceError(content)
            self.environment, self.card = content
            self._ready = True

    def run(self, row: Row, case: Case, differing: frozenset[str], limit: float) -> tuple[str, Any]:
        """Runs a case.

        Args:
          row: The row.
          case: The case.
          differing: Parity groups that are not timed.
          limit: Seconds after which the process is killed.

        Returns:
          ("measured", records), or ("failed", the reason); the process has ended if it crashed or exceeded the limit.
        """
        self.launch(row.alone and not self.rehearse)
        self.wait()
        self._connection.send((row.name, case.name, differing))
        return self._receive(limit)

    def stop(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = None

    def _receive(self, limit: float) -> tuple[str, Any]:
        try:
            if self._connection.poll(limit):
                return self._connection.recv()
            message = f"exceeded its limit of {limit:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            message = f"its process ended with exit code {self._process.exitcode}"
        self.stop()
        return "failed", message
