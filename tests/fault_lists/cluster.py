"""Planted faults in launchers, ranks, stops and hardware."""

from fault_places import MODULE, Fault

FAULTS = [
    Fault(
        subject="launcher's ports",
        description="torchrun's own store, on all interfaces, is kept",
        file="runtime/cluster/rendezvous.py",
        function="start_without_network",
        old='args.rdzv_backend = "one-node"',
        new="args.standalone = True",
        test="cluster/test_ports.py::test_no_other_user_reaches_a_run[launch_deepspeed.py]",
    ),
    Fault(
        subject="escapes",
        description="what a run prints keeps the control characters of others",
        file="runtime/cluster/ranks.py",
        function="print0",
        old="printable(str(text))",
        new="str(text)",
        test="test_untrusted.py::test_escapes_of_others_do_not_reach_the_terminal",
    ),
    Fault(
        subject="CPU quota",
        description="the cores that a container's quota leaves out are used, too",
        file="runtime/cores.py",
        function="usable_cores",
        old="max(1, min(cores, int(quota)))",
        new="cores",
        test="test_cores.py::test_usable_cores[v2]",
        quick=True,
    ),
    Fault(
        subject="OMP_NUM_THREADS",
        description="a single thread that the user has chosen is raised",
        file="runtime/cluster/join.py",
        function="user_set_threads",
        old='"OMP_NUM_THREADS" in psutil.Process().parent().environ()',
        new="False",
        test="cluster/test_launch.py::test_ranks_share_the_cores_of_a_node[torchrun-1-None-1]",
    ),
    Fault(
        subject="launchers, accelerate",
        description="its end is not noticed",
        file="runtime/cluster/store.py",
        function=MODULE,
        old='"accelerate"',
        new='"another launcher"',
        test="cluster/test_launch.py::test_launchers_are_known_by_their_commands[accelerate]",
    ),
    Fault(
        subject="Slurm script",
        description="each task of a node starts a launcher",
        file="examples/slurm/train_xl.sbatch",
        function=None,
        old='--ntasks="$SLURM_NNODES" --ntasks-per-node=1',
        new="",
        test=(
            "cluster/test_nodes.py::"
            "test_a_job_starts_one_launcher_on_each_node_with_all_of_its_cpus[two tasks]"
        ),
    ),
    Fault(
        subject="hidden GPUs",
        description="a name that no GPU has is taken for a fault of the driver",
        file="runtime/gpu_problems.py",
        function="undetected_gpu",
        old="problem = wrong_gpu_names(listed)",
        new="problem = None",
        test=(
            "plan/test_refusals.py::test_gpus_that_are_not_there_are_named["
            "8-CUDA_VISIBLE_DEVICES=8 names 8, but nvidia-smi lists GPUs 0 to 1: change it, or set]"
        ),
        quick=True,
    ),
    Fault(
        subject="stops, announcement",
        description="the line comes when the ranks agree, not when the signal comes",
        file="runtime/cluster/shutdown.py",
        function="Shutdown.request_exit",
        old="self.signals",
        new="False",
        test="cluster/test_stops.py::test_a_stop_is_announced_while_the_main_thread_waits",
    ),
    Fault(
        subject="stops, DeepSpeed's prints",
        description="the line is dropped with what DeepSpeed prints meanwhile",
        file="runtime/cluster/ranks.py",
        function="SilentThread.write",
        old="threading.get_ident() == self.thread",
        new="True",
        test=(
            "cluster/test_stops.py::"
            "test_a_signal_before_the_first_step_ends_the_run_with_one_line[SIGINT-deepspeed-"
            "initialize]"
        ),
    ),
    Fault(
        subject="stops, STOP",
        description="a STOP that was meant for an earlier run stops this one",
        file="runtime/cluster/requests.py",
        function="StopFile.__init__",
        old="self.identity()",
        new="None",
        test="cluster/test_stops.py::test_a_stop_file_that_is_touched_again_counts",
        quick=True,
    ),
    Fault(
        subject="launchers, mpirun",
        description="Slurm's variables win over those of mpirun, which starts its daemons by srun",
        file="runtime/cluster/launchers.py",
        function="find_launcher",
        old="LAUNCHERS",
        new="LAUNCHERS[::-1]",
        test=(
            "cluster/test_stops.py::test_variables_of_other_launchers_become_torchruns["
            "environ3-3 1 4 2 None]"
        ),
        quick=True,
    ),
    Fault(
        subject="launchers, unknown ranks",
        description="processes that don't know their rank train alone, each the whole run",
        file="runtime/cluster/ranks.py",
        function="refuse_runs_apart",
        old='STARTED_BY is not None and "RANK" not in os.environ',
        new="False",
        test="cluster/test_stops.py::test_processes_that_do_not_know_their_rank_are_refused",
    ),
    Fault(
        subject="launchers, several",
        description="srun starts several launchers on a node, each a run of its own",
        file="launch_deepspeed.py",
        function="refuse_further_launchers",
        old="int(count) > nodes",
        new="False",
        test="cluster/test_launch.py::test_one_launcher_for_each_node_is_right[4-2-True]",
        quick=True,
    ),
    Fault(
        subject="signals",
        description=(
            "SIGHUP is never handled, so a closed terminal ends the run without a checkpoint"
        ),
        file="runtime/cluster/requests.py",
        function="SignalWatch.__init__",
        old="number != signal.SIGHUP or not is_ignored",
        new="number != signal.SIGHUP and not is_ignored",
        test="cluster/test_shutdown.py::test_a_signal_saves_and_ends[fork-1-SIGHUP]",
    ),
    Fault(
        subject="GPU support",
        description="a GPU counts as supported if PyTorch has binaries for any older one",
        file="runtime/gpu_problems.py",
        function="unsupported_gpu",
        old='arch <= gpu and (kind == "compute" or arch[0] == gpu[0])',
        new="arch <= gpu",
        test="plan/test_refusals.py::test_a_card_needs_a_pytorch_that_has_its_kernels",
        quick=True,
    ),
    Fault(
        subject="stops, sample",
        description="after a run that was stopped at its start, a sample of an earlier one is printed",
        file="launch_deepspeed.py",
        function="run_headline",
        old="""\
if not found.items() - earlier.items():
    print_no_sample(settings.out_dir, bool(found))
    return""",
        new="""\
if not found:
    print_no_sample(settings.out_dir, bool(found))
    return""",
        test="test_shell.py::test_a_run_that_is_stopped_at_its_start_gets_no_sample_of_an_earlier_one",
    ),
    Fault(
        subject="launchers, several torchruns",
        description="mpirun starts several torchruns on a node, each a run of its own",
        file="runtime/cluster/launchers.py",
        function="launchers_apart",
        old="""\
if number(environ, launcher.size) > nodes:
    return several_launchers(launcher, environ[launcher.size])""",
        new="""\
if False:
    return several_launchers(launcher, environ[launcher.size])""",
        test="cluster/test_stops.py::test_a_torchrun_for_each_task_of_mpirun_is_refused",
    ),
    Fault(
        subject="launchers, help",
        description="torchrun's usage is printed, which has no script of ours",
        file="launch_deepspeed.py",
        function="parse_arguments",
        old="parser.usage = USAGE",
        new="pass",
        test="cluster/test_launch.py::test_help_lists_the_options_under_its_own_name",
    ),
    Fault(
        subject="stops, ranks",
        description="only a stop that rank 0 is asked for counts",
        file="runtime/cluster/shutdown.py",
        function="Shutdown.agree",
        old="dist.all_reduce(votes, op=dist.ReduceOp.MAX)",
        new="dist.broadcast(votes, 0)",
        test="cluster/test_stops.py::test_a_stop_after_an_evaluation_that_saved_nothing_saves",
    ),
    Fault(
        subject="uncaught errors",
        description="they are explained by whoever has come first",
        file="runtime/output.py",
        function="ExplainingHook.__call__",
        old="sorted(EXPLAINERS)",
        new="EXPLAINERS",
        test=(
            "cluster/test_output.py::test_uncaught_errors_are_explained_in_one_order["
            "RuntimeError('NCCL: out of memory')-1-too much memory]"
        ),
    ),
    Fault(
        subject="processes",
        description="Python 3.14 starts a server for them, which warns of locks at the exit",
        file="runtime/__init__.py",
        function=MODULE,
        old='multiprocessing.set_start_method("fork")',
        new="pass",
        test="test_versions.py::test_processes_are_forks_on_every_version_of_python",
    ),
]
