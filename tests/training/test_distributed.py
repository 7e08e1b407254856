"""Several processes on one machine: they match one process, stop together, and one process resumes their run."""

import concurrent.futures
import contextlib
import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hpnlp.errors import TemporaryError
from hpnlp.parallel.plan import Plan
from hpnlp.training.processes import attempts, distributed
from hpnlp.types import InputError
from tests.messages import raises

ROOT = Path(__file__).parents[2]
FIELDS = [
    "model.layers=2",
    "model.dim=32",
    "model.heads=2",
    "data.seq_len=32",
    "data.batch_size=16",
    "data.heldout_bytes=2000",
    "train.eval_stride=0",
    "train.eval_every=0",
    "train.log_every=1",
    "train.sample=0",
    # Programs of Muon take longer to compile. A schedule would depend on the number of steps.
    "optimizer.name=adamw",
    "optimizer.learning_rate=1e-3",
    "optimizer.schedule=constant",
    "optimizer.warmup=0",
]


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(workdir, processes, devices, *arguments, wait=120):
    """Starts processes of `hpnlp train` that connect over loopback, each with `devices` CPU devices."""
    port, started = free_port(), []
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "NPROC": str(4 * devices),
        "JAX_PLATFORMS": "cpu",
    }
    for process in range(processes):
        command = [sys.executable, "-m", "hpnlp", "train", "--config=experiments/lm/bytes.py", f"--workdir={workdir}"]
        command += [f"--config.{field}" for field in (f"data.path={os.environ['HPNLP_TEST_TEXT']}", *FIELDS)]
        if processes > 1:
            command += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process={process}"]
            command += ["--heartbeat=10", f"--wait={wait}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, **pipes))
    return started


def finish(started, timeout=400):
    try:
        return [(process.communicate(timeout=timeout)[0], process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()


def losses(workdir):
    lines = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_two_processes_match_one_and_one_resumes_their_run(tmp_path):
    """One process resumes on another mesh, from parameters that were sharded over both processes."""
    sharded = ["--config.plan.name=zero3", "--config.plan.tensor=2"]
    (output, code), (other, code_of_other) = finish(
        start(tmp_path / "two", 2, 4, *sharded, "--config.train.steps=4", "--config.train.sample=10")
    )
    assert (code, code_of_other) == (0, 0), output + other
    assert "8 cpu devices (fsdp 4, tensor 2)" in output and "step 4" in output and "held-out bits per byte" in output
    assert "step 4" not in other and "held-out" not in other
    assert other.count("process 1 of 2: process 0 prints the progress") == 1
    [(output, code)] = finish(start(tmp_path / "one", 1, 8, *sharded, "--config.train.steps=6"))
    assert code == 0, output
    two, single = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert set(two) == {1, 2, 3, 4} and set(single) == set(range(1, 7))
    assert two == pytest.approx({step: single[step] for step in two}, rel=1e-5)

    pipeline = ["--config.plan.name=pipeline", "--config.plan.pipeline=2", "--config.plan.data=2"]
    [(output, code)] = finish(start(tmp_path / "two", 1, 4, *pipeline, "--accept_changes", "--config.train.steps=6"))
    assert code == 0 and "going on from step 4" in output, output
    assert losses(tmp_path / "two") == pytest.approx(single, rel=1e-5)


@pytest.mark.slow
def test_signal_to_one_process_stops_both(tmp_path):
    """The signals that stop a process are those of `test_signals`."""
    started = start(tmp_path, 2, 2, "--config.train.steps=1000000")
    deadline = time.monotonic() + 200
    # The second step begins when both processes have done the first; before, a signal ends the process that gets it.
    while not (tmp_path / "metrics.jsonl").exists() or max(losses(tmp_path), default=0) < 3:
        assert time.monotonic() < deadline and started[0].poll() is None
        time.sleep(0.2)
    started[1].send_signal(signal.SIGTERM)
    (output, code), (_, code_of_other) = finish(started, timeout=120)
    assert (code, code_of_other) == (130, 130), output
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    assert f"SIGTERM: saved step {saved}" in output and max(losses(tmp_path)) == saved


@pytest.mark.slow
def test_death_of_a_process_ends_the_others(tmp_path):
    """Saved checkpoints stay, and the run resumes from them."""
    started = start(tmp_path, 2, 2, "--config.train.steps=1000000", "--config.train.checkpoint_every=1")
    deadline = time.monotonic() + 200
    while not any(path.name.isdigit() for path in (tmp_path / "checkpoints").glob("*")):  # others are incomplete
        assert time.monotonic() < deadline and started[0].poll() is None
        time.sleep(0.2)
    started[1].kill()
    (_, code), _ = finish(started, timeout=120)
    assert code != 0
    steps = f"--config.train.steps={max(losses(tmp_path)) + 2}"
    [(output, code)] = finish(start(tmp_path, 1, 2, "--accept_changes", steps))
    assert code == 0 and "going on from step" in output, output


def test_lost_process_ends_this_one_with_one_line(monkeypatch, capfd):
    """Other errors are raised unchanged, and so are all errors of a single process."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def fail(reason, processes):
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        with distributed.exit_on_lost_process():
            raise jax.errors.JaxRuntimeError(reason)

    fail("UNKNOWN: Gloo AllGather failed: Connection reset by peer\nand a stack", 2)
    assert ended == [75]
    output = capfd.readouterr().err
    assert (
        output.count("\n") == 1 and "has probably lost another process (UNKNOWN: Gloo AllGather failed: Conn" in output
    )
    for reason, processes in (
        ("RESOURCE_EXHAUSTED: Out of memory", 2),
        ("INTERNAL: NCCL operation ncclCommInitRankConfig failed: unhandled cuda error", 2),
        ("INVALID_ARGUMENT: optimization-barrier operand shape mismatch", 2),
        ("UNKNOWN: Gloo AllGather failed: Connection reset by peer", 1),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
            fail(reason, processes)


def test_absent_coordinator_raises():
    port = free_port()
    with pytest.raises(TemporaryError, match=f"no coordinator at 127.0.0.1:{port} in 1 s .* correct --coordinator"):
        distributed.join(f"127.0.0.1:{port}", 2, 1, seconds=1)


def test_brackets_of_ipv6_addresses_are_removed(monkeypatch):
    """Whether the machine supports IPv6 does not matter."""
    here, there = socket.socketpair()
    there.sendall(b"accepted\n")
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: asked.append(address) or here)
    distributed._report_to_coordinator("[::1]", 1234, 1, 20)
    with there:
        assert asked == [("::1", 1234)] and there.recv(99) == f"- 1 {socket.gethostname()}:{os.getpid()}\n".encode()


def test_absent_processes_raise():
    """The second of three processes reports, and a stranger sends something else."""
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(distributed.join, f"127.0.0.1:{port}", 3, 0, seconds=3)
        distributed._report_to_coordinator("127.0.0.1", port, 1, 3)
        distributed._report_to_coordinator("127.0.0.1", port, 1, 3)  # again, since the answer may have been lost
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1")
        with pytest.raises(
            TemporaryError, match=rf"of 3 processes, 2 did not connect to 127.0.0.1:{port} in 3 s: start each"
        ):
            first.result(timeout=30)


def test_strangers_and_stale_processes_are_refused_by_name(monkeypatch):
    for report, refusal in (
        ("2:new 1 there:7", ""),
        ("2:new 2 here:9", ""),  # sent again
        ("2:new 2 there:8", "process 2 has joined twice, as here:9 and as there:8: start each index once"),
        ("1:old 1 there:7", "process 1, there:7, belongs to attempt 1:old, and this is attempt 2:new"),
        ("2:new 0 there:7", "process 0, there:7, of 3 processes, whose other indices are 1 to 2"),
        ("GET / HTTP/1.1", None),
        ("", None),
    ):
        monkeypatch.setenv(attempts.VARIABLE, "2:new")
        present = {2: "here:9"}
        assert distributed._admit(report.split(), 3, present) == refusal
        assert present == {2: "here:9"} | ({1: "there:7"} if report == "2:new 1 there:7" else {})


def connected(port):
    """A connection to a server that may not have started yet."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))


def test_process_of_an_earlier_attempt_ends_with_the_reason(monkeypatch):
    """Process 0 names it too."""
    port = free_port()
    monkeypatch.setenv(attempts.VARIABLE, "2:new")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with socket.create_server(("127.0.0.1", port)) as server:
            report = pool.submit(distributed._report_to_coordinator, "127.0.0.1", port, 1, 3)
            with server.accept()[0] as connection:
                connection.sendall(b"refused process 1, here:1, belongs to attempt 2:new, and this is attempt 3:x\n")
            with pytest.raises(TemporaryError, match="process 0 refused process 1: .* and this is attempt 3:x"):
                report.result(timeout=30)
        first = pool.submit(distributed._wait_for_processes, "127.0.0.1", port, 2, 1)
        with connected(port) as stale:
            stale.sendall(b"1:old 1 there:7\n")
            assert stale.recv(99).startswith(b"refused process 1, there:7, belongs to attempt 1:old")
        with pytest.raises(TemporaryError, match="1 did not connect .* in 1 s .refused: process 1, there:7, belongs"):
            first.result(timeout=30)


def test_port_in_use_raises():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TemporaryError, match=f"--coordinator=127.0.0.1:{port}: port {port} cannot be opened"):
            distributed.join(f"127.0.0.1:{port}", 2, 0, seconds=3)


def test_invalid_arguments_raise():
    for arguments, message in (
        (("", 2), "--processes and --process come with --coordinator"),
        (("here", 2, 0), "--coordinator=here: expected HOST:PORT"),
        (("here:²", 2, 0), "expected HOST:PORT"),
        (("here:65536", 2, 0), "PORT from 1 to 65535"),
        (("here:80", 2, 2), "--process=2 of --processes=2: expected 0 to 1"),
        (("here:80", 0, 0), "--coordinator comes with --processes=N"),
    ):
        raises(message, distributed.join, *arguments)


def test_launchers_are_detected():
    for environment, processes in (
        ({"SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({"SLURM_NTASKS": "8"}, 0),  # a batch script by itself is one process
        ({"SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        (
            {"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"},
            8,
        ),  # mpirun starts a task on each node, and by it its own
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, 4),
    ):
        assert distributed.launched(environment) == processes


def test_launcher_unknown_to_jax_raises(monkeypatch):
    """Also a launcher whose processes JAX counts differently."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    raises("started 2 processes, and JAX found 1: pass --coordinator", distributed.join)

    def unknown(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", unknown)
    raises("pass --coordinator", distributed.join)


def test_different_configs_raise(monkeypatch):
    gathered = []
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", lambda digest: np.stack([digest, *gathered]))
    monkeypatch.setattr(distributed.multihost_utils, "broadcast_one_to_all", lambda digest: digest)
    distributed.check_same_config("one")  # alone
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    digest = np.frombuffer(hashlib.sha256(b"one").digest(), np.uint8)
    gathered[:] = [digest, digest]
    distributed.check_same_config("one")
    gathered[:] = [digest, digest[::-1]]
    raises("process 2 was given another config than process 0", distributed.check_same_config, "one")


def test_signals_after_the_last_step_stop_all_processes(monkeypatch):
    stopping, received = distributed.Stopping(), [0]
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", lambda number: np.stack([number, *received]))
    stopping.synchronize()
    assert stopping.signal == ""  # alone
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    stopping.synchronize()
    assert stopping.signal == ""
    received[:] = [int(signal.SIGTERM)]
    stopping.synchronize()
    assert stopping.signal == "SIGTERM"
    received[:] = [0]
    stopping.synchronize()
    assert stopping.signal == "SIGTERM"


@contextlib.contextmanager
def metadata(answers):
    """`(address, requests)` of a metadata server with these attributes, which refuses the first request."""
    asked = []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path.rpartition("/")[2], self.headers["Metadata-Flavor"]))
            value = answers.get(asked[-1][0])
            self.send_response(503 if len(asked) == 1 else 200 if value else 404)
            self.end_headers()
            self.wfile.write((value or "nothing").encode())

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    ("answers", "chips", "installed", "platform", "processes"),
    [
        ({"worker-network-endpoints": "a:b:10.0.0.1,a:c:10.0.0.2"}, ["/dev/accel0"], True, "", 2),
        ({"worker-network-endpoints": "10.0.0.1"}, ["/dev/vfio/0"], True, "", 1),
        (
            {"worker-network-endpoints": "a,b", "tpu-env": "X: '1'\nMEGASCALE_NUM_SLICES: '3'\n"},
            ["/dev/accel0"],
            True,
            "",
            6,
        ),
        ({"worker-network-endpoints": "a,b"}, [], True, "", 0),
        ({"worker-network-endpoints": "a,b"}, ["/dev/accel0"], True, "cpu", 0),
    ],
)
def test_hosts_of_a_tpu_are_counted(monkeypatch, answers, chips, installed, platform, processes):
    monkeypatch.setattr(distributed.glob, "glob", lambda pattern: [chip for chip in chips if chip[:9] == pattern[:9]])
    monkeypatch.setattr(distributed, "find_spec", lambda name: installed or None)
    with metadata(answers) as (where, asked):
        assert distributed.launched({"GCE_METADATA_IP": where, "JAX_PLATFORMS": platform}) == processes
    assert bool(asked) == bool(chips and installed and not platform)
    assert {flavor for _, flavor in asked} <= {"Google"}


def test_absent_metadata_server_gives_no_hosts(monkeypatch):
    monkeypatch.setattr(distributed.glob, "glob", lambda pattern: ["/dev/accel0"])
    monkeypatch.setattr(distributed, "find_spec", lambda name: True)
    assert distributed.launched({"GCE_METADATA_IP": f"127.0.0.1:{free_port()}"}) == 0


def test_environment_decides_on_gpus():
    for environment, all_of_them in (
        ({}, False),  # no launcher: JAX takes all by itself
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x16)"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),3", "SLURM_NODEID": "1"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),3", "SLURM_NODEID": "2"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, True),  # --gpus-per-task=1 shows each its own
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, False),  # mpirun, started by SLURM
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "JAX_LOCAL_DEVICE_IDS": "2,3"}, False),
    ):
        assert distributed.takes_all_gpus(environment) == all_of_them


@pytest.mark.parametrize(("tasks", "visible"), [("1(x2)", "all"), ("8(x2)", "3")])
def test_single_process_of_a_node_takes_all_gpus(monkeypatch, tasks, visible):
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.setattr(jax.distributed, "initialize", lambda: jax.config.update("jax_cuda_visible_devices", "3"))
    try:
        distributed._initialize()
        assert jax.config.values["jax_cuda_visible_devices"] == visible
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")


class Held:
    """A sharding of which this process's devices hold the given ranges of examples."""

    def __init__(self, *rows):
        self.rows = rows

    def addressable_devices_indices_map(self, shape):
        return {i: (slice(*rows), slice(None)) for i, rows in enumerate(self.rows)}


def test_batch_share_follows_the_sharding():
    mesh = Plan(data=4, tensor=2).mesh()
    assert distributed.batch_share(NamedSharding(mesh, PartitionSpec("data")), 16) == (0, 1)
    assert distributed.batch_share(Held((8, 12), (12, 16)), 16) == (1, 2)
    assert distributed.batch_share(Held((12, 16), (12, 16)), 16) == (3, 4)
    assert distributed.batch_share(Held((None, None)), 16) == (0, 1)
    for rows in (((0, 4), (8, 12)), ((2, 6),)):
        with pytest.raises(InputError, match="which are not one consecutive part of it"):
            distributed.batch_share(Held(*rows), 16)
    assert (
        distributed.lead_value(True)
        and not distributed.lead_value(False)
        and distributed.is_lead() == (jax.process_index() == 0)
    )
