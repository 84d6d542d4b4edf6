"""The engine runs methods: processes and devices, training, evaluation, run folders."""
