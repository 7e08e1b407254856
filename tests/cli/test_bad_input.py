"""Invalid input and errors of the machine: one line with the fix, exit code 2, no traceback without --debug, no data lost."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import jax
import pytest

from hpnlp import cli, report
from hpnlp.cli import experiment
from hpnlp.training import loop
from hpnlp.training.config import resolve
from tests import tiny
from tests.messages import raises

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]


@pytest.fixture
def error_of(run):
    """`error_of("train", ...)` returns the error message of a command, which is one line."""

    def call(*argv, code=2):
        outcome = run(*argv)
        assert outcome.code == code, outcome
        assert outcome.err.startswith("hpnlp: ") and outcome.err.count("\n") == 1 and outcome.err.endswith("\n")
        return outcome.err

    return call


@pytest.fixture
def train_error(error_of, tmp_path):
    """`train_error(...)` returns the error message of training a valid config with these arguments."""
    arguments = ("train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path / 'run'}")
    return lambda *argv, **options: error_of(*arguments, *argv, **options)


def test_invalid_fields_raise():
    for override, message in (
        ("--model.dims=3", "unknown config field 'model.dims': did you mean 'model.dim'?"),
        ("--config.modle.dim=3", "did you mean 'model.dim'?"),
        ("--config.model=3", "--model=3: model is a section: set one of its fields, for example --model.dim=VALUE"),
        ("--conifg.model.dim=3", "unknown config field 'conifg.model.dim': did you mean 'model.dim'?"),
        ("--modle.dim=3", "unknown config field 'modle.dim': did you mean 'model.dim'?"),
        ("--task", "--task has no value: write --task=VALUE (str)"),
        ("--train.steps=1e3", "--train.steps=1e3: expected int"),
        ("--data.weights=(1,", "--data.weights=(1,: expected tuple, for example (1,3)"),
        ("--model.dim=1.5", ": expected int"),
        ("--optimizer.learning_rate=fast", ": expected float"),
        ("--train.debug_nans=maybe", ": expected bool"),
        ("--plan.fsdp=two", ": expected int"),
        ("--model.dim", "--model.dim has no value: write --model.dim=VALUE (int)"),
        ("--model.mixer=full(", "model.mixer='full(' is not a spec"),
        ("--plan.remat=full,none", "plan.remat='full,none' names 2 entries: expected exactly one"),
        ("--model.mixer=fulll", "unknown mixer 'fulll': did you mean 'full'?"),
        ("--train.steps=" + "9" * 5000, "9...: expected int"),
        ("--optimizer.loss_scale=x", "--optimizer.loss_scale=x: expected float"),
    ):
        _, overrides = experiment.split(["hpnlp", override])
        raises(re.escape(message), lambda fields=overrides: resolve(experiment.overridden(tiny.get_config(), fields)))


def test_invalid_arguments_of_train_raise(train_error):
    for argument, message in (
        ("--skip_bad_lines", "unknown flag --skip_bad_lines: did you mean --data.skip_bad_lines?"),
        ("--name=adamw", "unknown flag --name: did you mean --optimizer.name or --plan.name?"),
        ("--config=tests", "--config: 'tests' is a directory: use an experiment file"),
        ("--config=/dev/null", "--config: '/dev/null' is no regular file: use an experiment file"),
        ("--config.optimizer.momentum=0.5", "optimizer.momentum=0.5 has no effect, because optimizer.name='adamw'"),
        ("--config.data.path=/no/such/text", "/no/such/text"),
        ("--workdri=x", "unknown flag --workdri: did you mean --workdir?"),
        ("--noaccept_chnages", "unknown flag --noaccept_chnages: did you mean --noaccept_changes?"),
        # Flags of libraries have such names: flagfile, verbosity, only_check_args, xml_output_file, logtostderr.
        ("--flagfiel=x", "unknown flag --flagfiel: hpnlp train --help lists the flags"),
        ("--logtostder", "unknown flag --logtostder: hpnlp train --help lists the flags"),
        ("more", "more and --workdir="),
        ("--wait=-1", "flag --wait=-1"),
        ("--debug=maybe", "flag --debug=maybe: expected true or false"),
        ("--config.train.steps -5", "-5 is read as a flag: a negative value is written --name=-5"),
        ("--coordinator=localhost:1 --processes=50000000 --process=0", "--processes=50000000: expected at most"),
    ):
        assert message in train_error(*argument.split(" "))


@pytest.mark.slow
def test_workdir_inside_the_data_raises(train_error, run, text, tmp_path):  # noqa: F811  (a fixture)
    shutil.copytree(text, tmp_path / "text")
    for directory in (tmp_path, tmp_path / "run"):
        shutil.copytree(text, directory / "text", dirs_exist_ok=True)
        assert "lies in data.path=" in train_error(f"--config.data.path={directory}")
    hidden = f"--workdir={tmp_path / '.runs' / 'a'}"
    argv = ("train", f"--config={tiny.EXPERIMENT}", f"--config.data.path={tmp_path}", hidden)
    assert run(*argv).code == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "--config: there is no file"),
        ("x = 1", "has no get_config(): define one that returns a config"),
        ("def get_config(:", "experiment.py, line 1: SyntaxError"),
        ("import nowhere", "experiment.py, line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("from hpnlp.spec import lookup\nlookup({'lstm': 1}, 'lstmm', 'encoder')", "experiment.py, line 2: unknown"),
        ("def get_config():\n    pass", "get_config() returned NoneType: return the ConfigDict"),
        ("c.model.dims = 3", 'experiment.py, line 4: AttributeError: Key "dims" does not exist'),
        ("c.model.dims = 3", 'Did you mean "dim" instead of "dims"?'),
        ("c.model.dim = 'wide'", "experiment.py, line 4: TypeError: Could not override field 'dim'"),
        ("c.train.steps = 0", "train.steps=0: expected at least 1"),
        ("def get_config():\n    open('/no/such')", "FileNotFoundError: [Errno 2] No such file or directory"),
        (
            "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict()",
            "get_config() returned a config without model.dim, model.heads, model.kv_heads, ...: begin with",
        ),
        (
            "import ml_collections\ndef get_config():\n    return ml_collections.FrozenConfigDict()",
            "get_config() returned FrozenConfigDict: return the ConfigDict",
        ),
        ("def get_config():\n    raise SystemExit('bye')", "experiment.py, line 2: SystemExit: bye\n"),
    ],
)
def test_invalid_experiment_files_raise(error_of, tmp_path, source, message):
    path = tmp_path / "experiment.py"
    if source is not None and source.startswith("c."):
        source = f"from hpnlp.training.config import default\ndef get_config():\n    c = default()\n    {source}\n    return c"
    if source is not None:
        path.write_text(source)
    assert message in error_of("train", f"--config={path}", f"--workdir={tmp_path / 'run'}")


def test_missing_arguments_raise(error_of):
    for argv, message in (
        (("trian",), "unknown command 'trian': did you mean 'train'?"),
        (("train", "--workdir=x"), "--config is required, for example --config=lm/bytes, or --task=TASK"),
        *(
            ((command, "x", "--heldout_path=y"), "unknown flag --heldout_path: did you mean --data.heldout_path?")
            for command in cli.TAKES_FIELDS
        ),
        (("predict", "x", "--heldout_path=y"), "unknown flag --heldout_path: hpnlp predict --help lists the flags"),
        (("train", "--task=clasification"), "unknown task 'clasification': did you mean 'classification'?"),
        (("plan", "--config=experiments/tagging/stdlib.py.py"), "did you mean tagging/stdlib"),
        (("sweep", "--workdir=x"), "--config is required, for example --config=lm/bytes"),
        (("sweep", "--config=lm/bytes", "--workdir=x"), "has no get_sweep(): define one"),
        (("generate", "--workdir=x", "--prompt_file=/no/such"), "--prompt_file=/no/such: No such file or directory"),
        (("plan", "--register=/no/such.py"), "--register: there is no file '/no/such.py': use a Python file that adds"),
        (("compare",), "no run: write hpnlp compare RUN RUN"),
    ):
        assert message in error_of(*argv)


def test_deleted_working_directory_raises(error_of, monkeypatch, tmp_path):
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    message = error_of("compare", "run")
    assert message == "hpnlp: the working directory does not exist any more: change to another one, as by cd\n"


def test_unknown_backends_of_matplotlib_are_not_read(start, finish, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    outcome = finish(start("draw", "Causal()", "--length=16", f"--out={tmp_path / 'a.png'}"))
    assert outcome.code == 0 and (tmp_path / "a.png").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directory of a finished run of twelve steps, with checkpoints of steps 10 and 12."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    config = tiny.make()
    report.write(workdir, config, loop.train(config, workdir), "--config=tests/tiny.py")
    return workdir


@pytest.fixture
def files(tmp_path, trained):
    """Paths by name, for the {name}s in the arguments below."""
    (tmp_path / "utf16").write_text("a prompt", "utf-16")
    (tmp_path / "wide").write_text("a prompt", "utf-16-le")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "blank").write_text("\n\n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, name in (
        ("piped", "config.json"),
        ("piped", "report.json"),
        ("locked", ".lock"),
        ("exported", "tokenizer.json"),
    ):
        (tmp_path / path).mkdir(exist_ok=True)
        os.mkfifo(tmp_path / path / name)
    (tmp_path / "exported" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "foreign").mkdir()
    shutil.copy(tmp_path / "exported" / "config.json", tmp_path / "foreign")
    (tmp_path / "begun").mkdir()
    shutil.copy(trained / "config.json", tmp_path / "begun")
    shutil.copy(trained / "tokenizer.json", tmp_path / "begun")
    shutil.copy(trained / "metrics.jsonl", tmp_path / "begun")
    names = {path.name: path for path in tmp_path.iterdir()}
    return names | {"run": trained, "dir": tmp_path, "config": tiny.EXPERIMENT, "nested": "(" * 3000 + ")" * 3000}


def test_unusable_paths_and_numbers_raise(error_of, monkeypatch, files):
    for argv, message in (
        ("train --config={config} --workdir={blank}", "blank is a file: use a directory"),
        ("train --config={config} --workdir={loop}/run", "loop/run (Too many levels of symbolic links)"),
        ("generate {run}/" + "x" * 300, "(File name too long)"),
        ("generate {run} --workdir={dir}", "name different runs: leave out one of them"),
        ("export {run} {dir} --to=x", "expected one run: write hpnlp export RUN --to=DIR"),
        ("export {run}@last2 --to=x", "run@last2 names 2 checkpoints: name one, as RUN or RUN@STEP"),
        ("convert {run}@11 --to={dir}/new", "no checkpoint 11 in"),
        ("train --config={config} --workdir={locked}", ".lock is not a regular file: move it away"),
        ("compare {piped}", "report.json is not a regular file: move it away"),
        ("convert --from={begun} --to={dir}/new", "no checkpoint in"),
        ("generate --workdir={run} --tokens=many", "flag --tokens=many: expected a whole number"),
        ("generate --workdir={run} --config.model.dim=3", "only train, check-data, sweep, lra, plan, scaling"),
        ("evaluate {run} --config.data.heldout=0.5", "data.heldout=0.5 would not be the run that was trained: leave"),
        ("generate {run} import", "'import' holds no run: name one, or write a prompt as --prompt='import'"),
        ("compare {run} --out=", "--out is empty: use a file, for example compare.png, or a directory"),
        ("compare {loop}", "loop"),
        ("convert --from={run} --to={blank}/x", "blank/x"),
        ("draw Causal() --out={blank}/x.png", "cannot draw"),
        ("draw Causal() --length=99999999999999999999", "length=99999999999999999999: expected at most 2147483647"),
        ("generate --workdir={run},", "the name of a run is empty: remove the comma before or after it, or name a run"),
        ("generate --workdir={run},{run}@12", "run, step 12, is named twice: an ensemble averages different runs"),
        ("evaluate {run}@10 --step=12", "--step=12: {run}@10 name their checkpoints by themselves: leave out --step"),
        ("generate --workdir={run} --temperature=0 --top_p=0.5", "--top_p=0.5 has no effect with --temperature=0"),
        ("generate --workdir={run} --tokens=0", "tokens=0: expected at least 1"),
        ("generate --workdir={run} --tokens=1000000000", "tokens=1000000000: the cache of 1 prompts"),
        ("generate --workdir={run} --seed=18446744073709551617", "seed=18446744073709551617: expected 0 to"),
        ("generate --workdir={run} --step=99999999999999999999", "no checkpoint 99999999999999999999"),
        ("generate --workdir={run} --prompt_file={dir}", "Is a directory: use a file of UTF-8 text, or - for stdin"),
        ("generate --workdir={run} --prompt_file={blank}", "blank: it holds no prompt: write one per line"),
        ("generate --workdir={run} --prompt_file=/dev/zero", "/dev/zero: it holds more than 64 MiB"),
        ("generate --workdir={run} --prompt_file={wide}", "wide: byte 1 is zero, as in binary files and UTF-16"),
        ("generate --workdir={run} --prompt_file={latin}", "latin: not UTF-8 (byte 0xe9 at 3), to be converted"),
        ("plan --config={config} --devices=4096 --depth=compiled", "simulates at most 2048 devices on a CPU: use"),
        ("plan --config={config} --config.plan.name=data --devices=1000000000", "does not split into 1000000000"),
    ):
        with monkeypatch.context() as patch:
            for variable in ("JAX_PLATFORMS", "XLA_FLAGS"):  # restored afterwards; plan sets them
                patch.setenv(variable, os.environ.get(variable, ""))
            assert message.format(**files) in error_of(*(argument.format(**files) for argument in argv.split()))


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."


def test_errors_of_the_machine_are_explained(train_error, monkeypatch):
    for error, message in (
        (
            jax.errors.JaxRuntimeError(OUT_OF_MEMORY),
            f"out of memory ({OUT_OF_MEMORY}): a step is planned to take 0.00 GB",
        ),
        (jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 8 bytes."), "GB with --plan."),
        (MemoryError("Unable to allocate 8 bytes"), "lower data.batch_size, data.seq_len or model.dim"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write a file (No space left on device): free some"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "cannot read or write /x (Permission denied)"),
    ):
        monkeypatch.setattr(loop, "train", Mock(side_effect=error))
        code = 75 if isinstance(error, OSError) and error.errno == errno.ENOSPC else 2
        assert message in train_error("--config.plan.name=data", code=code)


def test_defects_of_hpnlp_raise(run, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "train", Mock(side_effect=KeyError("defect")))
    with pytest.raises(KeyError, match="defect"):
        run("train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path}")


COMMANDS = {
    "help": "--help",
    "train": "train --config={config} --workdir={dir}/new",
    "generate": "generate --workdir={run} --prompt=a --tokens=2 --temperature=0",
    "evaluate": "evaluate {run} --batches=1",
    "plan": "plan --config={config} --devices=1",
    "compare": "compare {run} --out={dir}/compare.png",
    "draw": "draw Causal() --length=8 --out={dir}/draw.png",
    "convert": "convert --from={run} --to={dir}/converted",
}


@pytest.mark.parametrize(
    ("name", "stdout", "message"),
    [
        *((name, "/dev/full", "No space left on device") for name in ("train", "generate")),
        *(
            pytest.param(name, "/dev/full", "No space left on device", marks=pytest.mark.slow)
            for name in COMMANDS
            if name not in ("train", "generate")
        ),
        ("help", None, "it is closed"),
    ],
)
def test_files_are_complete_if_stdout_is_closed_or_full(run, monkeypatch, files, name, stdout, message):
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", ""))
    with open(stdout or os.devnull, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream if stdout else None)
        outcome = run(*(argument.format(**files) for argument in COMMANDS[name].split()))
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1 and f"hpnlp: stdout cannot be written ({message}): redirect it" in outcome.err
    written = {
        "train": "new/report.md",
        "compare": "compare.md",
        "draw": "draw.png",
        "convert": "converted/tokenizer.json",
    }
    assert name not in written or (files["dir"] / written[name]).stat().st_size
    if name == "train":
        assert json.loads((files["dir"] / "new" / "report.json").read_text())
        assert (files["dir"] / "new" / "checkpoints" / "12").is_dir()


@pytest.mark.parametrize("name", ["train", "generate"])
def test_characters_that_stdout_lacks_are_escaped(run, monkeypatch, files, name):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    argv = COMMANDS[name].replace("--prompt=a", "--prompt=\xe9").replace("/new", "/n\xe9w")
    outcome = run(*(argument.format(**files) for argument in argv.split()))
    assert outcome.code == 0
    assert b"\\xe9" in stdout.buffer.getvalue()
    assert "the encoding of stdout is ascii" in outcome.err.splitlines()[-1]


def test_prompts_are_read_from_stdin(run, monkeypatch, trained):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffthe fox\r\n\nthe dog".encode())))
    outcome = run("generate", f"--workdir={trained}", "--prompt_file=-", "--tokens=2")
    assert outcome.code == 0, outcome
    assert "--- prompt 1\nthe fox" in outcome.out and "--- prompt 2\nthe dog" in outcome.out


def test_text_ends_at_the_first_eos(run, trained, tmp_path):
    """Also if ids of text end a text, as generation_config.json may state; finished rows of the batch hold padding."""
    workdir = shutil.copytree(trained, tmp_path / "run")
    (workdir / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(257))}))
    outcome = run(
        "generate", f"--workdir={workdir}", "--prompt=the fox", "--prompt=the", "--tokens=20", "--temperature=0"
    )
    first, second = outcome.out.removeprefix("--- prompt 1\n").rstrip("\n").split("\n--- prompt 2\n")
    assert first.startswith("the fox") and len(first) <= len("the fox") + 1
    assert second.startswith("the") and len(second) <= len("the") + 1


def test_debug_prints_the_traceback(run, tmp_path):
    outcome = run("train", f"--config={tmp_path}/none.py", "--workdir=x", "--debug")
    assert outcome.code == 2
    assert (
        "Traceback (most recent call last)" in outcome.err and "InputError: --config: there is no file" in outcome.err
    )


# --- In processes: tests with real file systems, and with messages that libraries print at exit ---


@pytest.fixture(scope="module")
def mounts():
    """A wrapper that runs a shell script with private mounts; skips the test where mounting is not allowed."""
    probe = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"mounting is not allowed here: {probe.stderr.strip()}")
    return lambda script, *args: [*UNSHARE, "sh", "-c", script, "sh", *args]


def single_line(err):
    """Stderr of a process, which must be one line."""
    assert err.startswith("hpnlp: ") and err.count("\n") == 1
    return err


@pytest.mark.slow
def test_read_only_workdir_raises(mounts, start, finish, tmp_path):
    wrapper = mounts('mount -t tmpfs -o ro none "$1" && shift && exec "$@"', tmp_path)
    outcome = finish(start("train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path}/run", wrapper=wrapper))
    assert outcome.code == 2, outcome
    assert "cannot write to" in single_line(outcome.err) and "Read-only file system" in outcome.err


@pytest.mark.slow
def test_missing_device_raises(start, finish, monkeypatch, trained):
    for platform in ("cuda", "nothing"):
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        outcome = finish(start("generate", f"--workdir={trained}"))
        assert outcome.code == 2
        assert f"JAX_PLATFORMS={platform}: this machine has no such device" in single_line(outcome.err)


@pytest.mark.slow
@pytest.mark.parametrize(("redirection", "message"), [(">&-", "it is closed"), (">/dev/full", "No space left")])
def test_closed_or_full_stdout_of_a_process_raises(start, finish, trained, redirection, message):
    wrapper = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    outcome = finish(start("generate", f"--workdir={trained}", "--prompt=a", "--tokens=2", wrapper=wrapper))
    assert outcome.code == 2 and message in single_line(outcome.err)


@pytest.mark.slow
def test_run_resumes_after_a_full_disk(mounts, start, finish, tmp_path):
    """The disk has room for some checkpoints; with more room, the same command resumes from the last of them."""
    script = """
        mount -t tmpfs -o size=1400k none "$1" && mkdir "$1/run" && kept=$2 && disk=$1 && shift 2
        "$@" 1>&2; echo "code $?"
        cp -r "$disk/run" "$kept"
    """
    kept = tmp_path / "kept"
    (tmp_path / "disk").mkdir()
    command = ["train", f"--config={tiny.EXPERIMENT}", "--config.train.checkpoint_every=1", "--config.train.keep=100"]
    wrapper = mounts(script, tmp_path / "disk", kept)
    outcome = finish(start(*command, f"--workdir={tmp_path / 'disk' / 'run'}", wrapper=wrapper))
    assert outcome.out == "code 75\n", outcome
    assert "Traceback" not in outcome.err
    (message,) = [line for line in outcome.err.splitlines() if line.startswith("hpnlp: ")]
    assert "the disk is full" in message and "free some space" in message and "run the same command again" in message
    assert outcome.err.splitlines()[-1] == message

    steps = [int(path.name) for path in (kept / "checkpoints").iterdir() if path.name.isdigit()]
    assert steps
    again = finish(start(*command, f"--workdir={kept}"))
    assert again.code == 0, again
    assert f"going on from step {max(steps)}" in again.out
    lines = [json.loads(line)["step"] for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 13))


def test_truncated_checkpoint_raises(run, trained, tmp_path):
    """Without the damaged checkpoint, the run resumes from the one before."""
    workdir = shutil.copytree(trained, tmp_path / "run")
    command = ["train", f"--config={tiny.EXPERIMENT}", f"--workdir={workdir}"]
    metrics = (workdir / "metrics.jsonl").read_bytes()
    newest = workdir / "checkpoints" / "12"
    for path in newest.glob("params/**/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    outcome = run(*command)
    assert outcome.code == 2, outcome
    message = single_line(outcome.err)
    assert "checkpoint 12 cannot be read" in message and f"delete {newest}, and the run goes on from step 10" in message
    shutil.rmtree(newest)
    again = run(*command)
    assert again.code == 0 and "going on from step 10" in again.out
    assert (workdir / "metrics.jsonl").read_bytes() == metrics
