"""`hpnlp completion`: the script completes in bash."""

import shutil
import subprocess

import pytest

from hpnlp.__main__ import COMMANDS

TRY = """
source "$1"
while read -r COMP_LINE; do
  COMP_POINT=${#COMP_LINE}
  read -ra COMP_WORDS <<< "$COMP_LINE"
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _hpnlp
  echo "${COMPREPLY[*]}"
done
"""
COMPLETIONS = {
    "hpnlp eval": "evaluate",
    "hpnlp train --workd": "--workdir=",
    "hpnlp train --accept": "--accept_changes",
    "hpnlp train --config=lm/by": "lm/bytes",
    "hpnlp train --config=script.b": "script.bash",
    "hpnlp train --model.mixe": "--model.mixer=",
    "hpnlp train --model.mixer=perfor": "performer",
    "hpnlp plan --task=dual": "dual_encoder",
    "hpnlp train --regis": "--register=",
    "hpnlp generate --top_": "--top_k= --top_p=",
    "hpnlp generate --model.mixe": "",
    "hpnlp generate script": "script.bash",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="without bash")
def test_bash_completes_commands_flags_and_names(run, tmp_path):
    outcome = run("completion", "bash")
    assert outcome.code == 0, outcome
    (tmp_path / "script.bash").write_text(outcome.out)
    process = subprocess.run(
        ["bash", "-c", TRY, "bash", "script.bash"],
        input="\n".join(COMPLETIONS) + "\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert dict(zip(COMPLETIONS, process.stdout.split("\n"), strict=False)) == COMPLETIONS, process.stderr


def test_other_shells_have_scripts(run):
    assert "bashcompinit\n_hpnlp() {" in run("completion", "zsh").out
    fish = run("completion", "fish").out
    assert {line.split()[7] for line in fish.splitlines() if "-a" in line.split()[6:7]} == COMMANDS.keys()
    assert "-a generate -d 'continues prompts with" in fish
    assert "-l task -x -a 'lm rnn_lm" in fish and "generate" in fish and "-l top_p -r" in fish
    for argv in ((), ("csh",), ("bash", "zsh")):
        outcome = run("completion", *argv)
        assert outcome.code == 2 and "expected a shell: write hpnlp completion bash | zsh | fish" in outcome.err
