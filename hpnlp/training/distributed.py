"""Several processes that train one model: how they find each other, what each of them reads, and when they stop.

Process 0 leads: it alone writes what is written once (config, tokenizer, metrics, report) and speaks. All of them see one
workdir. Who loses a peer is ended by JAX within its heartbeat; the same command goes on from the newest checkpoint.
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
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from hpnlp.training import signals
from hpnlp.types import InputError

# Where a launcher says how many processes it has started: Open MPI's mpirun and SLURM's srun.
MOST = 1 << 20  # processes
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# Where a VM of Google's Compute Engine asks about the TPU that it has a part of.
METADATA = "http://{}/computeMetadata/v1/instance/attributes/{}"
# What errors say where another process has gone.
LOST = re.compile(
    "connection (closed|reset|refused)|(closed|reset) by peer|broken pipe|remote (process|error)|"
    "heartbeat|unavailable|deadline",
    re.IGNORECASE,
)

_tell_jax: Callable[[int], Any] | None = None  # JAX's own handler of SIGTERM, where `signals` has taken its place


def launched(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes a launcher that JAX knows has started, this among them, or how many hosts a TPU has; 0: none says."""
    for name in LAUNCHERS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    if "TPU_WORKER_HOSTNAMES" in environment:  # on GKE
        return len(environment["TPU_WORKER_HOSTNAMES"].split(",")) * int(environment.get("MEGASCALE_NUM_SLICES", 1))
    return _tpu_hosts(environment)


def _tpu_hosts(environment: Mapping[str, str]) -> int:
    """How many hosts there are to the TPU whose chips this one has; 0 where it has none, or nobody says."""
    chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    platforms = environment.get("JAX_PLATFORMS") or "tpu"
    if not chips or "tpu" not in platforms or find_spec("libtpu") is None or "TPU_SKIP_MDS_QUERY" in environment:
        return 0
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    if not (hosts := _ask(METADATA.format(server, "worker-network-endpoints"))):
        return 0
    slices = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", _ask(METADATA.format(server, "tpu-env")))
    return len(hosts.split(",")) * (int(slices[1]) if slices else 1)


def _ask(url: str, times: int = 4) -> str:
    """What a server answers that may be busy; "" where it knows nothing, or is not there."""
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for _ in range(times):
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode("utf-8", "replace")
        except OSError as error:
            if getattr(error, "code", 0) == 404:
                break
            time.sleep(0.5)
    return ""


def takes_all_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all GPUs that this process sees are its own: it is alone on its node, or is shown no more than one.

    JAX gives a launcher's process one of them, the one of its place on the node.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return False
    # As in "8(x2),3": of each node in turn.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
    node = int(environment.get("SLURM_NODEID", 0))
    beside = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", tasks[node] if node < len(tasks) else 0))
    shown = environment.get("CUDA_VISIBLE_DEVICES", "")
    return beside == 1 or (shown != "" and "," not in shown)


def join(
    coordinator: str = "", processes: int = 0, process: int = -1, *, seconds: int = 300, heartbeat: int = 100
) -> None:
    """Makes this process one of several, before anything else is asked of JAX; nothing where there is only one.

    coordinator: "host:port" where process 0 is to be found; "" leaves all to the launcher, where there is one. processes,
    process: how many there are, and which this is. seconds: how long to wait for the others. heartbeat: seconds without a sign
    of life after which a process is given up.
    Raises InputError on arguments that do not go together, and where the others are not found in time.
    """
    if not coordinator:
        if processes or process >= 0:
            raise InputError("--processes and --process come with --coordinator=HOST:PORT, the address of process 0")
        if (started := launched()) > 1:
            _initialize(heartbeat_timeout_seconds=heartbeat, initialization_timeout=seconds)
            if jax.process_count() != started:
                raise InputError(
                    f"a launcher has started {started} processes, and JAX found {jax.process_count()}: say who they are, by "
                    "--coordinator, --processes and --process"
                )
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"--coordinator={coordinator}: expected HOST:PORT, as in 10.0.0.1:1234, PORT from 1 to 65535")
    if processes > MOST:
        raise InputError(f"--processes={processes}: expected at most {MOST}")
    if processes < 1 or process < 0:
        raise InputError(
            "--coordinator comes with --processes=N, how many there are, and --process=I, which this is, from 0"
        )
    if process >= processes:
        raise InputError(f"--process={process} of --processes={processes}: expected 0 to {processes - 1}")
    # Where not all come, JAX ends the process, and says little.
    if process:
        _knock(host, int(port), process, seconds)
    else:
        _await(coordinator, int(port), processes, seconds)
    _initialize(coordinator, processes, process, heartbeat_timeout_seconds=heartbeat, initialization_timeout=seconds)


def _knock(host: str, port: int, process: int, seconds: int) -> None:
    """Waits for process 0, and tells it who is there."""
    until, reason = time.monotonic() + seconds, ""
    while time.monotonic() < until:
        try:
            # An IPv6 address stands in brackets before a port, and without them alone.
            with socket.create_connection((host.strip("[]"), port), timeout=5) as connection:
                connection.sendall(f"{process}\n".encode())
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    raise InputError(
        f"no coordinator at {host}:{port} in {seconds} s ({reason}): start process 0 there, or mend --coordinator"
    )


def _await(coordinator: str, port: int, processes: int, seconds: int) -> None:
    """Waits until all other processes have knocked at the port where JAX will listen then."""
    until, missing = time.monotonic() + seconds, set(range(1, processes))
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    try:
        server = socket.create_server(("", port), **both)
    except OSError as error:
        raise InputError(f"--coordinator={coordinator}: port {port} cannot be had here ({error.strerror})") from error
    with server:
        while missing:
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection = server.accept()[0]
                with connection:
                    connection.settimeout(5)
                    said = connection.recv(16).decode("ascii", "replace").strip()
                    missing -= {int(said)} if said.isdecimal() else set()
            except OSError:  # a stranger that says nothing, or nobody in time
                if time.monotonic() >= until:
                    names = ", ".join(map(str, sorted(missing)[:20])) + f" and {len(missing) - 20} more" * (
                        len(missing) > 20
                    )
                    raise InputError(
                        f"of {processes} processes, {names} did not come to {coordinator} in {seconds} s: start each with the "
                        "same --coordinator and its own --process, or mend --processes"
                    ) from None


def _initialize(*args: Any, **options: Any) -> None:
    global _tell_jax
    try:
        jax.distributed.initialize(*args, **options)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes did not find each other: {error}: start all of them, each once, and where no launcher that JAX "
            "knows starts them, say who they are, by --coordinator, --processes and --process"
        ) from error
    _tell_jax = signals.take_over(signal.SIGTERM)
    if takes_all_gpus():
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")
    if not is_lead():
        print(f"process {jax.process_index()} of {jax.process_count()}: process 0 says how the run goes", flush=True)


@contextlib.contextmanager
def others_may_die() -> Iterator[None]:
    """Ends this process with 1 and a line where it fails for want of another one; JAX would wait for it, and then abort."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        if jax.process_count() == 1 or not LOST.search(reason):
            raise
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(
            f"hpnlp: process {jax.process_index()} has lost another one, it seems ({reason}): give the same commands "
            "again, and they go on from the newest checkpoint",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def is_lead() -> bool:
    """Whether this process writes and speaks."""
    return jax.process_index() == 0


def agreed(value: bool) -> bool:
    """Process 0's value, in all of them."""
    return value if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.array(value)))


def check_alike(text: str) -> None:
    """Raises InputError, in all processes, where one of them was given another config than process 0."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    alike = (multihost_utils.process_allgather(digest) == multihost_utils.broadcast_one_to_all(digest)).all(axis=1)
    if not alike.all():
        others = ", ".join(map(str, np.flatnonzero(~alike)))
        raise InputError(
            f"process {others} was given another config than process 0: start all of them with the same one"
        )


class Stopping:
    """Between `begin` and `end`, has signals ask the run to save and stop. Called after every step: whether one has.

    signal: its name, or "" while none has come. Before `begin` and after `end` there is nothing to save, and signals act as
    before. In between, only a second Ctrl-C ends the run, and no sooner than a person would press it: a signal to a process
    group comes twice where the parent passes it on, and batch systems send several.
    """

    signal = ""

    def __init__(self) -> None:
        self._received, self._since = "", 0.0
        self._scope = contextlib.ExitStack()

    def begin(self) -> None:
        # Of several processes that nobody watches, JAX has SIGTERM.
        numbers = [number for number in signals.NUMBERS if number != signal.SIGTERM or jax.process_count() == 1]
        self._scope.enter_context(signals.reacting(self._note, numbers))

    def end(self) -> None:
        self._scope.close()

    def __call__(self, step: int) -> bool:
        # Of several processes all stop after the same step.
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = self._received or signal.SIGTERM.name
        return self.signal != ""

    def agree(self) -> None:
        """Tells all processes, after the last step, of a signal that one of them received since; called by all of them."""
        if jax.process_count() > 1 and not self.signal:
            number = signal.Signals[self._received].value if self._received else 0
            numbers = multihost_utils.process_allgather(np.array(number)).reshape(-1)
            self.signal = next((signal.Signals(int(number)).name for number in numbers if number), "")

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._since = signal.Signals(number).name, now
            if jax.process_count() == 1:
                self.signal = self._received
            else:
                _announce_stop()
            signals.say(
                f"{self._received}: saving after this step; Ctrl-C again, after 2 s, ends the run without saving"
            )
        elif number == signal.SIGINT and now - self._since >= signals.REPEAT_SECONDS:
            signals.end(number)


def _announce_stop() -> None:
    """Has JAX tell the other processes, by what it does at SIGTERM."""
    if _tell_jax is None:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        _tell_jax(signal.SIGTERM)


def share(sharding: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """(number, count): which part of the rows of a batch this process reads, of how many.

    Processes whose devices hold the same rows read the same part.
    Raises InputError where its devices hold rows that are not side by side.
    """
    slices = {index[0].indices(shape[0])[:2] for index in sharding.addressable_devices_indices_map(shape).values()}
    first, last = min(low for low, _ in slices), max(high for _, high in slices)
    count = last - first
    if sum(high - low for low, high in slices) != count or shape[0] % count or first % count:
        raise InputError(
            f"the devices of process {jax.process_index()} hold rows {sorted(slices)} of a batch, which are no part of it: "
            "choose plan sizes so that each process has rows side by side"
        )
    return first // count, shape[0] // count
