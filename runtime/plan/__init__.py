"""From settings to a RunPlan, or every reason why they can't work.

    run_plan.py     makes the plan, in this order: rules, machine, data, start, model, disk, memory
    plan.py         RunPlan: all that is decided before a run starts
    problems.py     collects problems, so that the user sees all of them together
    rules.py        ranges and contradictions of settings; epochs as iterations
    unread.py       settings that nothing reads
    ramps.py        whether the ramps fit the batch, the data and the loop
    machine.py      the device, or the GPU that target_gpu names
    start.py        where the weights come from: init_from; what a tag records of the plan
    compare.py      a run and the tag that it starts from
    out_dir.py      the output folder, and the space on its disk
    memory.py       the memory of each GPU and of the host: MemoryInputs
    step_time.py    the time of a step
    advice.py       settings that fit
    report.py       the plan as text, and what is printed if memory runs out
"""
