"""Training by several processes: how they find each other, which examples each of them reads, and when they stop.

Process 0 leads: it alone writes what is written once (config, tokenizer, metrics, report) and prints the progress. All
processes see one workdir. When a process dies, JAX ends the others within the heartbeat timeout; the same command resumes the
run from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import signal
import socket
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from hpnlp.errors import TRY_AGAIN, TemporaryError, plural
from hpnlp.training.processes import attempts, signals
from hpnlp.types import InputError

# Environment variables with the number of processes, set by launchers: Open MPI's mpirun and SLURM's srun.
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# Metadata of a VM of Google's Compute Engine, among them attributes of the TPU that its chips are a part of.
METADATA = "http://{}/computeMetadata/v1/instance/attributes/{}"
MAX_PROCESSES = 1 << 20
NO_ATTEMPT = "-"  # in a report to process 0
ACCEPTED, REFUSED = "accepted", "refused"  # answers of process 0 to a report
METADATA_ATTEMPTS = 4  # the metadata server may be busy
# Messages of errors that are raised when another process has died.
LOST = re.compile(
    "connection (closed|reset|refused)|(closed|reset) by peer|broken pipe|remote (process|error)|"
    "heartbeat|unavailable|deadline",
    re.IGNORECASE,
)

_jax_sigterm_handler: Callable[[int], Any] | None = None  # JAX's handler of SIGTERM, if `signals` has replaced it


def launched(environment: Mapping[str, str] = os.environ) -> int:
    """Number of processes that a launcher known to JAX has started, or number of hosts of a TPU.

    Args:
      environment: Environment variables.

    Returns:
      The number, this process included; 0 without a launcher or a TPU.
    """
    for name in LAUNCHERS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    if "TPU_WORKER_HOSTNAMES" in environment:  # on GKE
        return len(environment["TPU_WORKER_HOSTNAMES"].split(",")) * int(environment.get("MEGASCALE_NUM_SLICES", 1))
    return _tpu_hosts(environment)


def _tpu_hosts(environment: Mapping[str, str]) -> int:
    """Number of hosts of the TPU whose chips this host has; 0 without a TPU, or if the metadata server does not have it."""
    chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    platforms = environment.get("JAX_PLATFORMS") or "tpu"
    if not chips or "tpu" not in platforms or find_spec("libtpu") is None or "TPU_SKIP_MDS_QUERY" in environment:
        return 0
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    if not (hosts := _metadata(METADATA.format(server, "worker-network-endpoints"))):
        return 0
    slices = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata(METADATA.format(server, "tpu-env")))
    return len(hosts.split(",")) * (int(slices[1]) if slices else 1)


def _metadata(url: str) -> str:
    """Value of an attribute of the VM; "" if it does not exist, or the server does not answer."""
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for _ in range(METADATA_ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode("utf-8", "replace")
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 404:
                break
            time.sleep(0.5)
    return ""


def takes_all_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process should use all GPUs that it sees: it is the only one on its node, or sees a single GPU.

    JAX gives each process of a launcher one GPU, the one whose number is the process's rank on the node.

    Args:
      environment: Environment variables.

    Returns:
      Whether it should.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return False
    # SLURM lists the tasks of each node in order: "8(x2),3" is 8, 8, 3.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
    node = int(environment.get("SLURM_NODEID", 0))
    slurm_tasks = tasks[node] if node < len(tasks) else 0
    processes = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", slurm_tasks))
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return processes == 1 or (visible != "" and "," not in visible)


def join(
    coordinator: str = "", processes: int = 0, process: int = -1, *, seconds: int = 300, heartbeat: int = 100
) -> None:
    """Connects this process to the others of a run; does nothing if there is only one. Call it before any other use of JAX.

    Args:
      coordinator: "host:port" of process 0; "" to use what a launcher provides, if there is one.
      processes: Number of processes.
      process: Index of this process, from 0.
      seconds: Time to wait for the other processes.
      heartbeat: Seconds without a sign of life after which a process counts as dead.

    Raises:
      InputError: The arguments do not fit together.
      TemporaryError: The other processes did not connect in time, or the port is in use.
    """
    timeouts = {"heartbeat_timeout_seconds": heartbeat, "initialization_timeout": seconds}
    if not coordinator:
        if processes or process >= 0:
            raise InputError("--processes and --process come with --coordinator=HOST:PORT, the address of process 0")
        if (started := launched()) > 1:
            _initialize(**timeouts)
            if jax.process_count() != started:
                raise InputError(
                    f"a launcher has started {started} processes, and JAX found {jax.process_count()}: pass --coordinator, "
                    "--processes and --process"
                )
        return
    host, port = _parse_coordinator(coordinator)
    if processes < 1 or process < 0:
        raise InputError(
            f"--coordinator comes with --processes=N, the number of processes, and --process=I, the index of this one "
            f"from 0, and was given with --processes={processes} --process={process}"
        )
    if processes > MAX_PROCESSES:
        raise InputError(f"--processes={processes}: expected at most {MAX_PROCESSES}")
    if process >= processes:
        raise InputError(f"--process={process} of --processes={processes}: expected 0 to {processes - 1}")
    # JAX aborts the process, without a useful message, if one of the others does not connect: check that first.
    if process:
        _report_to_coordinator(host, port, process, seconds)
    else:
        _wait_for_processes(coordinator, port, processes, seconds)
    _initialize(coordinator, processes, process, **timeouts)


def _parse_coordinator(coordinator: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"--coordinator={coordinator}: expected HOST:PORT, as in 10.0.0.1:1234, PORT from 1 to 65535")
    return host, int(port)


def _report_to_coordinator(host: str, port: int, process: int, seconds: int) -> None:
    """Waits for process 0, sends it the attempt, index and name of this process, and reads the answer."""
    deadline, reason = time.monotonic() + seconds, ""
    report = f"{attempts.current() or NO_ATTEMPT} {process} {socket.gethostname()}:{os.getpid()}\n".encode()
    while time.monotonic() < deadline:
        try:
            # An IPv6 address has brackets before a port, and none by itself.
            with socket.create_connection((host.strip("[]"), port), timeout=5) as connection:
                connection.sendall(report)
                verdict, _, refusal = connection.recv(1024).decode("utf-8", "replace").partition(" ")
            if verdict.strip() == ACCEPTED:
                return
            if verdict == REFUSED:
                raise TemporaryError(f"process 0 refused process {process}: {refusal.strip()}")
            reason = "it accepts no processes at present"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(0.2)
    raise TemporaryError(
        f"no coordinator at {host}:{port} in {seconds} s ({reason}): start process 0 there, or correct --coordinator"
    )


def _wait_for_processes(coordinator: str, port: int, processes: int, seconds: int) -> None:
    """Waits until all other processes have reported to the port that JAX will listen at afterwards."""
    deadline, present = time.monotonic() + seconds, dict[int, str]()
    options = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    try:
        server = socket.create_server(("", port), **options)
    except OSError as error:
        raise TemporaryError(
            f"--coordinator={coordinator}: port {port} cannot be opened ({error.strerror}): choose another port"
        ) from error
    refusals = list[str]()
    with server:
        while missing := sorted(set(range(1, processes)) - set(present)):
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = server.accept()[0]
                with connection, connection.makefile("rw", encoding="utf-8", errors="replace") as stream:
                    connection.settimeout(5)
                    refusal = _admit(stream.readline(1024).split(), processes, present)
                    if refusal is None:  # not a process of hpnlp
                        continue
                    stream.write(f"{REFUSED} {refusal}\n" if refusal else f"{ACCEPTED}\n")
            except OSError:  # nobody connected in time, or a connection that sends nothing
                if time.monotonic() >= deadline:
                    names = ", ".join(map(str, missing[:20])) + f" and {len(missing) - 20} more" * (len(missing) > 20)
                    refused = f" (refused: {'; '.join(refusals)})" if refusals else ""
                    raise TemporaryError(
                        f"of {processes} processes, {names} did not connect to {coordinator} in {seconds} s{refused}: start "
                        "each with the same --coordinator and another --process, or correct --processes"
                    ) from None
            else:
                if refusal and refusal not in refusals:
                    refusals.append(refusal)
                    print(f"refused: {refusal}", file=sys.stderr, flush=True)


def _admit(report: Sequence[str], processes: int, present: dict[int, str]) -> str | None:
    """Adds a process to `present`, or gives the reason for a refusal.

    Args:
      report: Words of the process's report: attempt, index, name.
      processes: Number of processes.
      present: The processes that were admitted before.

    Returns:
      "", or the reason why the process is refused; None if the report is not one of hpnlp.
    """
    if len(report) != 3 or not (report[1].isascii() and report[1].isdigit()):
        return None
    attempt, index, name = report[0], int(report[1]), report[2]
    if attempt != (current := str(attempts.current() or NO_ATTEMPT)):
        return f"process {index}, {name}, belongs to attempt {attempt}, and this is attempt {current}"
    if not 0 < index < processes:
        return f"process {index}, {name}, of {processes} processes, whose other indices are 1 to {processes - 1}"
    if present.setdefault(index, name) != name:
        return f"process {index} has joined twice, as {present[index]} and as {name}: start each index once"
    return ""


def _initialize(*args: Any, **options: Any) -> None:
    """`jax.distributed.initialize`, with the handling of SIGTERM and the choice of GPUs."""
    global _jax_sigterm_handler
    try:
        jax.distributed.initialize(*args, **options)
    except (RuntimeError, ValueError) as error:
        kind = InputError if isinstance(error, ValueError) else TemporaryError  # ValueError: arguments that do not fit
        raise kind(
            f"the processes did not find each other ({error}): start each of them once; without a launcher that JAX knows, "
            "pass --coordinator, --processes and --process"
        ) from error
    _jax_sigterm_handler = signals.take_over(signal.SIGTERM)
    if takes_all_gpus():
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")
    if not is_lead():
        print(f"process {jax.process_index()} of {jax.process_count()}: process 0 prints the progress", flush=True)


@contextlib.contextmanager
def exit_on_lost_process() -> Iterator[None]:
    """Ends this process with exit code 75 and one line when an operation fails because another process has died.

    JAX would wait for the other process, and abort after the heartbeat timeout.

    Yields:
      None.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        if jax.process_count() == 1 or not LOST.search(reason):
            raise
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(
            f"hpnlp: process {jax.process_index()} has probably lost another process ({reason}): run the same commands "
            "again, they resume from the newest checkpoint",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(TRY_AGAIN)


def is_lead() -> bool:
    """True in the process that writes files and prints the progress.

    Returns:
      Whether this process is process 0.
    """
    return jax.process_index() == 0


def lead_value(value: bool) -> bool:
    """Value of process 0, in all processes.

    Args:
      value: The value in this process.

    Returns:
      The value in process 0.
    """
    return value if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.array(value)))


def check_same_config(text: str) -> None:
    """Checks that all processes have the same config.

    Args:
      text: The config of this process, as text.

    Raises:
      InputError: In all processes, if one of them has another config than process 0.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    is_same = (multihost_utils.process_allgather(digest) == multihost_utils.broadcast_one_to_all(digest)).all(axis=1)
    if not is_same.all():
        differing = ", ".join(map(str, np.flatnonzero(~is_same)))
        raise InputError(
            f"process {differing} was given another config than process 0: start all processes with the same one"
        )


class Stopping:
    """Stops a run after the current step when a signal arrives, so that the run is saved.

    Between `begin` and `end`, the first signal requests the stop. Only a second Ctrl-C ends the process before that, and only
    if it comes after signals.REPEAT_SECONDS: a signal to a process group arrives twice if the parent process passes it on, and
    batch systems send several. Before `begin` and after `end`, signals act as before, since there is nothing to save.

    Calling the object after each step returns True if the run should stop.

    Attributes:
      signal: Name of the signal that stops the run; "" as long as there is none.
    """

    signal = ""

    def __init__(self) -> None:
        self._received, self._received_at = "", 0.0
        self._scope = contextlib.ExitStack()

    def begin(self) -> None:
        """Starts to intercept signals."""
        # With several processes and outside of `signals.watched`, JAX handles SIGTERM.
        numbers = [number for number in signals.NUMBERS if number != signal.SIGTERM or jax.process_count() == 1]
        self._scope.enter_context(signals.reacting(self._note, numbers))

    def end(self) -> None:
        """Ceases to intercept signals."""
        self._scope.close()

    def __call__(self, step: int) -> bool:
        # Several processes agree on a step after which all of them stop.
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = self._received or signal.SIGTERM.name
        return self.signal != ""

    def synchronize(self) -> None:
        """Shares a signal that one process has received after the last step with all processes; all of them must call it."""
        if jax.process_count() > 1 and not self.signal:
            number = signal.Signals[self._received].value if self._received else 0
            numbers = multihost_utils.process_allgather(np.array(number)).reshape(-1)
            self.signal = next((signal.Signals(int(number)).name for number in numbers if number), "")

    def _note(self, number: int) -> None:
        """Records the first signal and announces the stop; a second SIGINT after a pause ends the process."""
        now = time.monotonic()
        if not self._received:
            self._received, self._received_at = signal.Signals(number).name, now
            if jax.process_count() == 1:
                self.signal = self._received
            else:
                _announce_stop()
            signals.write_line(
                f"{self._received}: saving after this step; Ctrl-C again, after 2 s, ends the run without saving"
            )
        elif number == signal.SIGINT and now - self._received_at >= signals.REPEAT_SECONDS:
            signals.end(number)


def _announce_stop() -> None:
    """Makes JAX announce a stop to the other processes, as it does at SIGTERM."""
    if _jax_sigterm_handler is None:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        _jax_sigterm_handler(signal.SIGTERM)


def batch_share(sharding: Any, batch_size: int) -> tuple[int, int]:
    """Part of each batch that this process reads. Processes whose devices hold the same examples read the same part.

    Args:
      sharding: Sharding of an array of one number per example, `[B]`.
      batch_size: Examples of a batch, over all processes.

    Returns:
      `(index, count)`: the batch is read as `count` equal parts of consecutive examples, and this process reads part `index`.

    Raises:
      InputError: The devices of this process hold examples that are not consecutive.
    """
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    slices = {index[0].indices(batch_size)[:2] for index in indices}
    first, last = min(low for low, _ in slices), max(high for _, high in slices)
    count = last - first
    if sum(high - low for low, high in slices) != count or batch_size % count or first % count:
        raise InputError(
            f"the devices of process {jax.process_index()} hold the examples {sorted(slices)} of a batch, which are not one "
            "consecutive part of it: choose sizes of the plan so that each process holds consecutive examples"
        )
    return first // count, batch_size // count


def describe_devices(mesh: Mesh | AbstractMesh) -> str:
    """Describes the devices of a mesh.

    Returns:
      Text such as `8 cpu devices (data 4, tensor 2)`.
    """
    devices = jax.devices()
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    used = f"{mesh.size} of {len(devices)}" if mesh.size < len(devices) else len(devices)
    return f"{used} {devices[0].platform} {plural(len(devices), 'device')}{f' ({axes})' * bool(axes)}"
