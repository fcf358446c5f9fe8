"""`attnix replay`: the kernel itself, under a simulated clock, over a recorded trace.

profile   what a machine and a model cost: a pass, a transfer, a frame
workload  a trace as sessions of turns, with real token arrays
device    simulated devices: they take time and move nothing
engine    the clock: arrivals, completions and timers into `Kernel.step`, effects out
metrics   what one run measured, as numbers
optimum   Belady's bound for the very order of prompts that a run had
report    table, JSON and plot of several runs
"""
