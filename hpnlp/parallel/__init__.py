"""Layout of a computation on a mesh of devices.

plan.py: the Plan, mesh axis sizes and the table from logical axes to mesh axes. layout.py: a Plan resolved on devices, with
the sharding of every array. zero.py: ZeRO's shardings. tensor_parallel.py: heads and MLP columns. vocab_parallel.py:
embedding lookup and loss. operations.py: independent functions on different devices. pipeline.py: the pipeline schedule.
ring_schedule.py and context_parallel.py: sequences divided over devices. remat.py: rematerialisation policies.
host_offload.py: arrays in the host's memory. distributed_matrices.py: functions of complete matrices, for optimizers.

These modules know the logical names of array axes, not models.
"""
