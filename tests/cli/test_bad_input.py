"""Bad input: one line that names the mend, exit code 2, no traceback unless --debug, and nothing lost."""

import json
import os
import shutil
import subprocess

import pytest

from tests import tiny

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]


@pytest.fixture
def refused(run):
    """The line that a command answers with."""

    def call(*argv):
        outcome = run(*argv)
        assert outcome.code == 2, outcome
        assert outcome.err.startswith("hpnlp: ") and outcome.err.count("\n") == 1 and outcome.err.endswith("\n")
        return outcome.err

    return call


@pytest.fixture
def train(refused, tmp_path):
    """The same for `train` with a config that is fine but for the arguments."""
    return lambda *argv: refused("train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path / 'run'}", *argv)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.model.dims=3", "unknown config field 'model.dims': did you mean 'model.dim'?"),
        ("--config.modle.dim=3", "did you mean 'model.dim'?"),
        (
            "--config.model=3",
            "--config.model=3: model is a section: set one of its fields, as --config.model.dim=VALUE",
        ),
        ("--conifg.model.dim=3", "unknown flag --conifg.model.dim: did you mean --config.model.dim?"),
        ("--config.train.steps=1e3", "hpnlp: --config.train.steps=1e3: expected int\n"),
        ("--config.data.weights=(1,", "hpnlp: --config.data.weights=(1,: expected tuple, as (1,3)\n"),
        ("--config.data.tokenizer=bpe", "tokenizer 'bpe' takes (size): missing a required argument: 'size'"),
        ("--config.train.profile=10:15", "train.profile='10:15' goes beyond train.steps=12"),
        ("--config=tests", "--config: 'tests' is a directory: name an experiment file"),
        (
            "--config.model.dim=wide",
            "--config.model.dim=wide: expected int\n",
        ),
        ("--config.model.dim=1.5", ": expected int"),
        ("--config.optimizer.learning_rate=fast", ": expected float"),
        ("--config.train.debug_nans=maybe", ": expected bool"),
        ("--config.plan.fsdp=two", ": expected int"),
        ("--config.model.dim", "--config.model.dim has no value: write --config.model.dim=VALUE (int)"),
        ("--config.train.steps=0", "train.steps=0: expected at least 1"),
        ("--config.train.seed=-1", "train.seed=-1: expected at least 0"),
        ("--config.train.profile=5", "train.profile='5': expected \"first:last\""),
        ("--config.train.writers=tensorbord", "unknown writer 'tensorbord': did you mean 'tensorboard'?"),
        ("--config.optimizer.name=adam", "unknown optimizer 'adam': did you mean 'adamw'?"),
        ("--config.optimizer.schedule=cosine(", "hpnlp: optimizer.schedule='cosine(' is not a spec"),
        ("--config.model.mixer=full(", "hpnlp: model.mixer='full(' is not a spec"),
        ("--config.model.output=full(", "hpnlp: model.output='full(' is not a spec"),
        ("--config.plan.remat=names(", "hpnlp: plan.remat='names(' is not a spec"),
        ("--config.plan.remat=full,none", "hpnlp: plan.remat='full,none' names 2 entries: expected exactly one"),
        ("--config.train.writers=wandb(", "hpnlp: train.writers='wandb(' is not a spec"),
        ("--config.data.tokenizer=bpe(()", "hpnlp: data.tokenizer='bpe(()' is not a spec"),
        ("--config.model.mixer=fulll", "unknown mixer 'fulll': did you mean 'full'?"),
        ("--config.model.output=ful", "unknown output layer 'ful': did you mean 'full'?"),
        ("--config.model.dtype=float8", "unknown model.dtype 'float8': did you mean 'float"),
        ("--config.model.dim=17", "model.dim=17 is not a multiple of model.heads=2: change one"),
        ("--config.plan.data=3", "does not divide 8 devices: 3 is the product of the given sizes"),
        ("--config.plan.pipeline=8", "does not divide into plan.pipeline=8 stages: make it a multiple of 8"),
        ("--config.plan.zero=5", "plan.zero=5: expected a stage of ZeRO, 0 to 3"),
        ("--config.plan.exchange=rings", "plan.exchange='rings': did you mean 'ring'?"),
        ("--config.plan.name=dta", "unknown plan.name 'dta': did you mean 'data'?"),
        ("--config.data.batch_size=12", "data.batch_size=12 does not split into 8 devices' rows"),
        ("--config.data.path=/no/such/text", "/no/such/text"),
        ("--config.data.tokenizer=byts", "did you mean 'bytes'?"),
        ("--config.data.seq_len=1000000", "add text, or lower data.seq_len"),
        ("--workdri=x", "Unknown command line flag 'workdri'. Did you mean: workdir"),
        ("more", "unexpected argument 'more': flags are written --name=value"),
    ],
)
def test_what_train_refuses(train, argument, message):
    assert message in train(argument)


def test_sequence_longer_than_the_model_allows(train):
    said = train("--config.model.position=learned", "--config.model.max_len=8")
    assert "data.seq_len=16 is longer than model.max_len=8 learned positions: change one" in said


def test_text_that_cannot_be_read(train, tmp_path):
    """One case of each kind; the others: tests/data."""
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in train(f"--config.data.path={tmp_path / 'empty'}")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert "a.jsonl" in (said := train(f"--config.data.path={tmp_path / 'a.jsonl'}")) and "2" in said
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 30_000)
    said = train(f"--config.data.path={tmp_path / 'latin.txt'}", "--config.data.tokenizer=words(50)")
    assert "latin.txt" in said and "UTF-8" in said


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "--config: there is no file"),
        ("x = 1", "has no get_config(): define one that returns a config"),
        ("def get_config(:", "experiment.py, line 1: SyntaxError"),
        ("import nowhere", "experiment.py, line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("def get_config():\n    pass", "get_config() returned NoneType: return the ConfigDict"),
        ("c.model.dims = 3", 'experiment.py, line 4: AttributeError: Key "dims" does not exist'),
        ("c.model.dims = 3", 'Did you mean "dim" instead of "dims"?'),
        ("c.model.qqqq = 3", "cannot be added since the config is locked.\n"),
        ("c.model.dim = 'wide'", "experiment.py, line 4: TypeError: Could not override field 'dim'"),
        ("c.train.steps = 0", "train.steps=0: expected at least 1"),
    ],
)
def test_experiment_file_that_is_at_fault(refused, tmp_path, source, message):
    path = tmp_path / "experiment.py"
    if source is not None and source.startswith("c."):
        source = f"from hpnlp.training.config import default\ndef get_config():\n    c = default()\n    {source}\n    return c"
    if source is not None:
        path.write_text(source)
    assert message in refused("train", f"--config={path}", f"--workdir={tmp_path / 'run'}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("trian",), "unknown command 'trian': did you mean 'train'?"),
        (("train", "--workdir=x"), "--config is needed, as in --config=experiments/lm/bytes.py"),
        (("train", f"--config={tiny.EXPERIMENT}"), "--workdir is needed, as in --workdir=runs/bytes"),
        (("sweep", "--config=experiments/lm/bytes.py", "--workdir=x"), "has no get_sweep(): define one"),
        (
            ("generate", "--workdir=x", "--prompt_file=/no/such"),
            "--prompt_file=/no/such: No such file or directory: name",
        ),
        (("compare",), "no run is named: hpnlp compare RUN RUN"),
        (("compare", "/no/such/run"), "there is no directory '/no/such/run': name the workdir of a run"),
    ],
)
def test_what_commands_refuse(refused, argv, message):
    assert message in refused(*argv)


def test_debug_shows_the_traceback(run, tmp_path):
    outcome = run("train", f"--config={tmp_path}/none.py", "--workdir=x", "--debug")
    assert outcome.code == 2
    assert (
        "Traceback (most recent call last)" in outcome.err and "InputError: --config: there is no file" in outcome.err
    )


def test_workdir_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    said = refused("train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path}/file/run")
    assert "cannot write to workdir" in said and "choose another --workdir" in said


# --- What needs a process of its own: real file systems, and what libraries print when a process ends ---


@pytest.fixture(scope="module")
def mounts():
    """The command that makes file systems which nobody else sees; skips where it may not be used."""
    probe = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"mounting is not allowed here: {probe.stderr.strip()}")
    return lambda script, *args: [*UNSHARE, "sh", "-c", script, "sh", *args]


def one_line(err):
    assert err.startswith("hpnlp: ") and err.count("\n") == 1
    return err


def test_read_only_workdir(mounts, start, finish, tmp_path):
    wrapper = mounts('mount -t tmpfs -o ro none "$1" && shift && exec "$@"', tmp_path)
    outcome = finish(start("train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path}/run", wrapper=wrapper))
    assert outcome.code == 2, outcome
    assert "cannot write to workdir" in one_line(outcome.err) and "Read-only file system" in outcome.err


@pytest.mark.slow
def test_full_disk_keeps_what_was_saved(mounts, start, finish, tmp_path):
    """A disk that takes some checkpoints, and then is full; once there is room, the same command goes on."""
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
    assert outcome.out == "code 2\n", outcome
    assert "Traceback" not in outcome.err
    (said,) = [line for line in outcome.err.splitlines() if line.startswith("hpnlp: ")]
    assert "the disk is full" in said and "free some space" in said and "run the same command again" in said
    assert outcome.err.splitlines()[-1] == said

    steps = [int(path.name) for path in (kept / "checkpoints").iterdir() if path.name.isdigit()]
    assert steps
    again = finish(start(*command, f"--workdir={kept}"))
    assert again.code == 0, again
    assert f"going on from step {max(steps)}" in again.out
    lines = [json.loads(line)["step"] for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 13))


def test_half_written_checkpoint(run, start, finish, tmp_path):
    """A file of the newest checkpoint that was cut off; without that checkpoint, the run goes on from the one before."""
    command = ["train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path}"]
    assert run(*command).code == 0
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    newest = tmp_path / "checkpoints" / "12"
    for path in newest.glob("params/**/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    outcome = finish(start(*command))
    assert outcome.code == 2, outcome
    said = one_line(outcome.err)
    assert "checkpoint 12 cannot be read" in said and f"delete {newest}, and the run goes on from step 10" in said
    shutil.rmtree(newest)
    again = run(*command)
    assert again.code == 0 and "going on from step 10" in again.out
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
