"""Extension: one training on several machines, with a supervisor on each, and Slurm jobs.

Libraries start a row on several nodes, and do not bound its end:

- torchrun's agent (``accelerate launch --rdzv_backend c10d``) reacts to its own processes and to
  new members alone (``SimpleElasticAgent._invoke_run``). Tried on two nodes: after a cut link
  (DDP, ZeRO-2), or with a rank under SIGSTOP (ZeRO-2), no node ended within 75 s. It also needs
  host names that resolve: "socket.gaierror: Temporary failure in name resolution".
- ``srun --kill-on-bad-exit`` ends all tasks when one exits. Ranks that wait for a lost node do not
  exit, and Slurm notices the node after SlurmdTimeout, 300 s by default. We use it for the rest.
- submitit pickles functions, and reads states from ``sacct`` alone. Tried on a Slurm without
  accounting: ``job.results()`` of a cancelled job had not returned after 180 s.
"""
