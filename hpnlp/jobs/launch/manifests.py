"""Scripts and manifests for engines that own several machines: they start the processes, and restart them by exit code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from hpnlp.jobs.launch.command import Command

PORT = 8476
GRACE_SECONDS = 120  # from a signal to the end, for a checkpoint

SLURM = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={hosts} --ntasks-per-node=1 --exclusive
#SBATCH --requeue --open-mode=append --signal=TERM@{grace}
#SBATCH --output={name}_%j.log
# Add what the cluster needs, such as --gpus-per-node, --partition and --time. All nodes see the directory of the run.

restarts=${{SLURM_RESTART_COUNT:-0}}
job=$SLURM_JOB_ID
if [ -n "$SLURM_ARRAY_JOB_ID" ]; then job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
export HPNLP_ATTEMPT=$restarts:$job

srun --kill-on-bad-exit=1 {command}
code=$?

# 75: try again, as after the loss of a process; 134 and 137: aborted or killed. 2: invalid input, 1: a defect, 130: a signal.
case $code in
  75 | 134 | 137)
    if [ "$restarts" -lt {restarts} ]; then scontrol requeue "$job"; fi ;;
esac
exit $code
"""

JOBSET = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  failurePolicy:
    maxRestarts: {restarts}
    restartStrategy: BlockingRecreate
    rules:
      - name: invalidInput
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          parallelism: {hosts}
          completions: {hosts}
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [2]
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {grace}
              containers:
                - name: train
                  image: IMAGE  # an image with hpnlp
                  env:
                    - name: JOBSET_UID
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.labels['jobset.sigs.k8s.io/jobset-uid']
                    - name: RESTART
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.labels['jobset.sigs.k8s.io/restart-attempt']
                    - name: HPNLP_ATTEMPT
                      value: $(RESTART):$(JOBSET_UID)
                  command:
{command}
                  # Add resources, such as nvidia.com/gpu, and the volume that holds the directory of the run.
"""

XPK = """#!/bin/bash
# Add --cluster, the type of device and the image, as for any workload of xpk. xpk restarts on 42 and 127 to 255 by itself.
xpk workload create \\
  --workload={name} \\
  --num-slices={hosts} \\
  --max-restarts={restarts} \\
  --restart-on-exit-codes=1,75 \\
  --termination-grace-period-seconds={grace} \\
  --command={command}
"""


def slurm(command: Command, hosts: int, restarts: int) -> str:
    """A batch script for SLURM.

    Args:
      command: The training.
      hosts: Number of nodes, each with one process.
      restarts: Number of restarts.

    Returns:
      The script.
    """
    line = shlex.join(["hpnlp", "train", *command.arguments])
    return SLURM.format(name=_name(command), hosts=hosts, restarts=restarts, grace=GRACE_SECONDS, command=line)


def jobset(command: Command, hosts: int, restarts: int) -> str:
    """A manifest of a JobSet for Kubernetes.

    Args:
      command: The training.
      hosts: Number of pods, each with one process.
      restarts: Number of restarts.

    Returns:
      The manifest, as YAML.
    """
    name = _name(command)
    arguments = ["hpnlp", "train", *(argument.replace("$(", "$$(") for argument in command.arguments)]
    if hosts > 1:
        arguments += [f"--coordinator={name}-workers-0-0.{name}:{PORT}", f"--processes={hosts}"]
        arguments.append("--process=$(JOB_COMPLETION_INDEX)")
    lines = "\n".join(f"                    - {_quoted(argument)}" for argument in arguments)
    return JOBSET.format(name=name, hosts=hosts, restarts=restarts, grace=GRACE_SECONDS, command=lines)


def xpk(command: Command, hosts: int, restarts: int) -> str:
    """A script that creates a workload by xpk.

    Args:
      command: The training.
      hosts: Number of slices.
      restarts: Number of restarts.

    Returns:
      The script.
    """
    line = shlex.join(["hpnlp", "train", *command.arguments])
    return XPK.format(
        name=_name(command), hosts=hosts, restarts=restarts, grace=GRACE_SECONDS, command=shlex.quote(line)
    )


def _name(command: Command) -> str:
    """A name for the job, as Kubernetes allows it: that of the directory in lower case, at most 40 characters."""
    name = re.sub(r"[^a-z0-9]+", "-", command.workdir.name.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def _quoted(text: str) -> str:
    """A string of YAML."""
    return "'" + text.replace("'", "''") + "'"


# Engine -> function of the command, the number of hosts and the number of restarts.
WRITERS: dict[str, Callable[[Command, int, int], str]] = {"slurm": slurm, "jobset": jobset, "xpk": xpk}
