"""Write the tables of README.md, RESULTS.md and docs/ from the JSON files in results/.

    python results/table.py

A table stands between <!-- table: NAME --> and <!-- end -->; TABLES has the names. Of several measurements of one case
it shows the newest. So put a file of bench.py into results/ as h200_x1_bench_NAME.json, one of results/sampling.py as
h200_x1_sample_NAME.json, and run this.
"""

import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import settings_of_script
from results.estimates import XL, meta_model, planned_gb
from results.race import best_baselines, group_of, seconds_to
from results.runs import (
    is_of_recipe,
    link,
    markdown,
    median,
    newest,
    races,
    read,
    sampling_runs,
    short_commit,
    speed_cells,
    training_runs,
)
from runtime.cluster.ranks import Ranks
from runtime.output import exit_with_error
from runtime.plan.report import memory_report, summary
from runtime.plan.run_plan import Problems, make_plan

BLOCK = re.compile(r"<!-- table: (\S+) -->\n(.*?)(<!-- end -->|(?=<!-- table: )|\Z)", re.S)
SPLIT, SOURCE = "micro-batch x accumulation", "commit, date"
DRILLS = {  # file without cpu_ and .json: the result, from its keys
    "kill": "{kills} kills, {kills_inside_a_save} inside a save; {iterations:,} losses equal to the last bit",
    "corrupt": "{noticed} of {tried} damages noticed",
    "diskfull": "{ways} ways to run out of disk survived",
    "reshard": "{changes} changes of ranks and stages; losses within {worst:.0e}",
    "signals": "{trials} ways to stop under four launchers; {orphans} processes left; {slowest} s at most",
    "signals_moments": "{trials} stops at random moments, {in_an_evaluation} of them inside an evaluation; losses "
                       "equal to the last bit; {slowest} s at most",
    "prepare": "{mb:,} MB in {seconds} s with 2 workers; the same bytes after {kills} kills"}
CARDS = (  # one GPU for GPT-2 XL: what the table calls it, --target_gpu, what to add to the command
    ("8 GB", "8", "config/lora_xl.py"), ("16 GB (T4)", "T4", "config/presets/16gb.py"),
    ("24 GB (RTX 4090)", "4090", "config/presets/24gb.py"), ("32 GB (V100)", "V100-32", "config/presets/32gb.py"),
    ("32 GB (RTX 5090)", "5090", "config/presets/24gb.py"),
    ("40 GB (A100)", "A100-40", "--batch_size=auto"), ("80 GB (H100)", "H100", "--batch_size=auto"),
    ("141 GB (H200)", "H200", "--batch_size=auto"))


def cards():
    """What a dry run prints for GPT-2 XL on one GPU. These are estimates."""
    rows = []
    for name, gpu, option in CARDS:
        settings = settings_of_script(str(ROOT / "train_deepspeed.py"), [
            "config/xl_shakespeare.py", option, "--dry_run=True", f"--target_gpu={gpu}"])
        one = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)
        plan = make_plan(settings, one, Problems(), [])
        gb = [re.search(rf"^{part} +(\S+) GB", memory_report(plan, one), re.M)[1] for part in ("each GPU", "host")]
        time = re.search(r"^time +(at least )?.* per step, (.*) for 20 steps", summary(plan), re.M)
        how = "LoRA" if plan.lora else "offload" if "offload" in settings.deepspeed_config else "all weights"
        how += ", 8-bit moments" * settings.compact_optimizer
        rows.append([name, f"`{option}`", how, *gb, (time[1] or "") + time[2] if time else "not estimated"])
    return markdown(["card", "add", "trains", "GPU memory, GB", "RAM, GB", "20 steps, min:s"], rows)


def speed():
    """One H200: GPT-2 XL by micro-batch and in FP8, and GPT-2 small."""
    cases = {case: newest(runs) for case, runs in training_runs().items()
             if (case.gpu, case.gpus, case.stage, case.optimizer) == ("H200", 1, 2, "adamw")}
    small = max((case for case in cases if case.model == "gpt2"), key=lambda case: cases[case]["tokens_per_s"])
    shown = [*(case for case in cases if case.model in ("gpt2-xl", "gpt2-xl, FP8") and case.micro in (32, 8, 1)), small]
    rows = []
    for case in shown:
        run = cases[case]
        split, ms, *others = speed_cells(case, run)
        rows.append([case.gpus, case.model, split, link(run, ms), *others])
    return markdown(["GPUs", "model", SPLIT, "ms per step", "tokens/s", "MFU", "peak GB"], rows)


def training():
    """All cases but those of the tables fsdp2, muon and memory. A speedup is of the case's newest file with this
    baseline."""
    rows, elsewhere = [], memory_runs()
    for case, runs in training_runs().items():
        run, compared = newest(runs), sorted((run for run in runs if "baseline" in run), key=lambda run: run["date"])
        if case.optimizer != "adamw" or case in elsewhere or "FSDP2" in run.get("baseline", {}).get("name", ""):
            continue
        baselines = {}
        for base in compared:
            name = base["baseline"]["name"]
            short = name.split()[0]
            if short == "transformers":  # ours and plain PyTorch are always compiled
                short += ", compiled" if name.endswith("compiled") else ", not compiled"
            baselines[short] = base
        speedup = ", ".join(link(base, f"{base['baseline']['ratio']:.2f}x {name}, {short_commit(base)}")
                            for name, base in baselines.items())
        gpus = f"{case.gpus} {case.gpu}" if case.gpu != "H200" else case.gpus
        model = case.model + (f", ZeRO-{case.stage}" if case.stage != 2 else "")
        rows.append([gpus, model, *speed_cells(case, run), link(run), speedup])
    return markdown(["GPUs", "model", SPLIT, "ms per step", "tokens/s", "MFU", "peak GB", SOURCE, "speedup"], rows)


def fsdp2():
    """ZeRO-3, FSDP2 in the same command, and ZeRO-2 if it ran on the same commit."""
    rows, cases = [], training_runs()
    for case, runs in cases.items():
        runs = [run for run in runs if "FSDP2" in run.get("baseline", {}).get("name", "")]
        if runs:
            run, other = newest(runs), newest(runs)["baseline"]
            zero2 = [r for r in cases.get(case._replace(stage=2), ()) if r["commit"] == run["commit"]]
            rows.append([case.gpu, *speed_cells(case, run), median(other), f"{other['peak_gb']:.1f}",
                         f"{other['ratio']:.2f}x", median(newest(zero2)) if zero2 else "", link(run)])
    return markdown(["GPU", SPLIT, "ZeRO-3, ms per step", "tokens/s", "MFU", "peak GB", "FSDP2, ms per step", "peak GB",
                     "speedup", "ZeRO-2, ms per step", SOURCE], rows)


def muon():
    rows, cases = [], training_runs()
    for case, runs in cases.items():
        if case.optimizer == "muon":
            run, others = newest(runs), cases[case._replace(optimizer="adamw")]
            adamw = newest([other for other in others if other["commit"] == run["commit"]] or others)
            rows.append([case.gpus, case.model, f"{case.micro} x {case.accumulation}", median(adamw), median(run),
                         f"{run['ms']['median'] / adamw['ms']['median']:.3f}", f"{adamw['peak_gb']:.1f}",
                         f"{run['peak_gb']:.1f}", link(run)])
    return markdown(["GPUs", "model", SPLIT, "AdamW, ms per step", "Muon, ms per step", "ratio", "AdamW, peak GB",
                     "Muon, peak GB", SOURCE], rows)


def race():
    """GPT-2 small from scratch by nanoGPT's recipe and ours with the rates of config/train_gpt2.py, and in the last
    columns compared with the best baseline of the GPU, seed and text. Ours with AdamW has the baseline's rates."""
    rows = []
    for file in races():
        best = best_baselines(file["runs"])
        ours = [run for run in file["runs"] if is_of_recipe(run)]
        shown = [best[group] for group in {group_of(run) for run in ours}] + ours
        for run in sorted(shown, key=lambda run: (*group_of(run), run["label"])):
            steps, seconds, loss = run["curve"][-1]
            _, base_seconds, base_loss = best[group_of(run)]["curve"][-1]
            recipe = "plain PyTorch, AdamW"
            compared = ["", ""]
            if run["way"] == "ours":
                recipe = "ours, Muon" if "muon" in run["label"] else "ours, AdamW"
                reached = seconds_to(run["curve"], base_loss)
                if reached:
                    compared = [f"{reached:.0f}", f"{reached / base_seconds:.2f}"]
            if "fp8" in run["label"]:
                recipe += ", FP8"
            rows.append([run["hardware"].split()[1], recipe, run["seed"], f"{steps:,}", f"{loss:.4f}", f"{seconds:.0f}",
                         *compared, link({"file": file["file"]} | run)])
    return markdown(["GPU", "recipe", "seed", "steps", "validation loss", "training, s",
                     "to the best baseline's loss, s", "of its time", SOURCE], rows)


def ramps():
    """GPT-2 small from scratch with ramps, and the time to the last loss of plain PyTorch with the same GPU, seed and
    text."""
    (file,) = read("h200_x1_ramps_tuned.json")
    (short,) = read("race_short.json")
    best = best_baselines(short["runs"])
    of_seed = {seed: run["curve"][-1] for (gpu, seed, text), run in best.items()
               if gpu == "NVIDIA H200" and text == file["runs"][0]["text"]}
    rows = []
    for run in file["runs"]:
        command = run["command"]
        batch, length = (re.search(f"--{name}=(.*?) --", command) for name in ("batch_ramp", "length_ramp"))
        seed = int(re.search(r"--seed=(\d+)", command)[1])
        steps, seconds, loss = run["curve"][-1]
        _, base_seconds, base_loss = of_seed[seed]
        reached = seconds_to(run["curve"], base_loss)
        rows.append([batch[1], length[1] if length else "", "FP8" if "--fp8=True" in command else "bfloat16", seed,
                     f"{steps:,}", f"{loss:.4f}", f"{seconds:.0f}", f"{reached:.0f}" if reached else "",
                     f"{reached / base_seconds:.3f}" if reached else "", link({"file": file["file"]} | run)])
    return markdown(["`batch_ramp`", "`length_ramp`", "precision", "seed", "steps", "validation loss", "training, s",
                     "to plain PyTorch's last loss, s", "of its time", SOURCE], rows)


def fast_path_losses():
    """GPT-2 small with fast paths turned on and off: the mean training loss of the last ten steps that were logged."""
    rows = []
    for file in read("h100_x1_losses.json", "h200_x2_losses.json"):
        gpus = f"{file['world_size']} {file['hardware'].split()[1]}"
        for name, run in file["runs"].items():
            rows.append([gpus, name, f"{statistics.mean(run['loss'][-10:]):.4f}", f"{run['val'][-1]:.4f}", link(file)])
    return markdown(["GPUs", "variant", "training loss", "validation loss", SOURCE], rows)


def memory_runs():
    """Return {case: its newest run} of GPT-2 XL on one H200 with what saves memory."""
    return {case: newest(runs) for case, runs in training_runs().items() if (case.gpu, case.gpus) == ("H200", 1)
            and re.search("LoRA|offload|checkpointing", case.model)}


def memory():
    """What saves memory. The estimate is that of a dry run, without CUDA."""
    rows = []
    for case, run in memory_runs().items():
        s = run["settings"]
        planned = planned_gb(meta_model(s["lora_rank"], **XL), s["deepspeed_config"], case.micro,
                             s["gradient_checkpointing"], pretrained=s["init_from"] != "scratch")
        split, ms, *_, gb = speed_cells(case, run)
        rows.append([case.model.removeprefix("gpt2-xl, ") + f", ZeRO-{case.stage}" * (case.stage == 3), split, ms, gb,
                     f"{planned:.1f}", link(run)])
    return markdown(["with", SPLIT, "ms per step", "peak GB", "estimate, GB", SOURCE], rows)


def sampling():
    rows = []
    for case, runs in sampling_runs().items():
        run, compared, speedup = newest(runs), [run for run in runs if "baseline" in run], ""
        if compared:
            base = newest(compared)
            ratio = base["tokens_per_s"]["median"] / base["baseline"]["tokens_per_s"]["median"]
            speedup = link(base, f"{ratio:.2f}x, {short_commit(base)}")
        rows.append([*case, median(run, "tokens_per_s"), median(run, "first_token_ms"), link(run), speedup])
    return markdown(["hardware", "model", "batch size", "tokens/s", "first token, ms", SOURCE, "speedup"], rows)


def checkpoints():
    """Saves of new runs with the time that each blocks training, and resumes on another number of GPUs."""
    rows = []
    for file in read("h100_x1_checkpoints.json", "h200_x2_checkpoints.json"):
        for name, run in file["runs"].items():
            saves = ", ".join(f"{seconds:.1f}" for seconds in run["save_s"])
            blocked = ", ".join(f"{seconds:.2f}" for seconds in run["blocked_s"])
            text = f"{run['gpus']} {file['hardware'].split()[1]}, {name}"
            rows.append([text, saves, blocked, *(run["verify_and_load_s"] or ["", ""]), link(file)])
    return markdown(["run", "save, s", "blocks training, s", "verify, s", "load, s", SOURCE], rows)


def drills():
    rows = []
    for name, text in DRILLS.items():
        file, = read(f"cpu_{name}.json")
        result = text.format(**file, ways=len(file.get("cases", ()))) if file["passed"] else "failed"
        command = re.sub(r" --(json|folder)\S+", "", file["command"])
        rows.append([f"`{command}`", result, link(file)])
    return markdown(["drill", "result", SOURCE], rows)


def char():
    muon, adamw = read("h200_x1_char.json", "h200_x1_char_adamw.json")
    demo, = read("cpu_demo.json")
    rows = []
    for text, run, reached in (
            ("`config/shakespeare_char.py`, one H200", muon, ""),
            ("with AdamW, one H200", adamw, ""),
            ("`config/shakespeare_char_cpu.py`, Muon, 2 cores", demo["muon"], demo["reached"]["muon"][1]),
            ("with AdamW, 2 cores", demo["adamw"], demo["reached"]["adamw"][1])):
        best = min((r for r in run["history"] if "val_loss" in r), key=lambda r: r["val_loss"])
        ms = statistics.median(r["ms"] for r in run["history"] if "ms" in r)
        rows.append([text, f"{run['history'][-1]['iter']:,}", f"{best['val_loss']:.4f} after {best['iter']:,}",
                     f"{ms:.1f}", reached, link({"file": demo["file"]} | run)])
    return markdown(["run", "steps", "best validation loss", "ms per step", "to AdamW's last loss, s", SOURCE], rows)


def installs():
    """README's command in fresh Debian roots: tests/fresh_root.py."""
    rows = []
    for file in read("cpu_install_*.json"):
        system = f"Debian {file['debian']}"
        if file.get("memory_limit_gb"):
            system += f", {file['memory_limit_gb']:g} GB of RAM"
        (downloaded,) = re.findall(r"([\d,]+) MB, now unpacking", "\n".join(file["console"]))
        cache = "empty" if file["cache"] == "empty" else "warm"
        seconds = f"{file['install_s']:.0f}"
        loss = f"{file['best_val_loss']:.4f}"
        rows.append([system, file["python"], file["installer"], cache, downloaded, seconds,
                     f"{file['venv_gb']:.2f}", loss, link(file)])
    heads = ["system", "Python", "with", "cache", "packages, MB", "installation, s", ".venv, GB"]
    return markdown([*heads, "demo's loss", SOURCE], rows)


def suites():
    """./run_tests.sh in fresh Debian roots: tests/fresh_root.py --tests."""
    rows = []
    for file in read("cpu_suite_*.json"):
        counts, seconds = re.search(r"(.*?)(?:, \d+ warnings)? in ([\d.]+)s", file["tests"]).groups()
        rows.append([f"Debian {file['debian']}", file["python"], file["installer"], counts,
                     f"{float(seconds) / 60:.0f}", link(file)])
    return markdown(["system", "Python", "with", "tests", "minutes", SOURCE], rows)


def compact():
    """GPT-2 XL with gradient checkpointing on H200s: results/compact.py speed."""
    rows = []
    for file in read("h200_x[0-9]_compact.json"):
        gpus = file["hardware"].split()[0]
        for split, ways in file["runs"].items():
            plain, ours = ways["fp32"], ways["compact"]
            ratio = ours["ms"]["median"] / plain["ms"]["median"]
            rows.append([gpus, split.replace("x", " x "), f"{plain['ms']['median']:.0f}", f"{ours['ms']['median']:.0f}",
                         f"{ratio:.3f}", f"{plain['peak_gb']:.1f}", f"{ours['peak_gb']:.1f}", link(file)])
    return markdown(["GPUs", SPLIT, "float32 state, ms per step", "compact, ms per step", "ratio",
                     "float32 state, peak GB", "compact, peak GB", SOURCE], rows)


TABLES = {
    "cards": cards, "speed": speed, "training": training, "fsdp2": fsdp2, "muon": muon, "race": race,
    "fast-path-losses": fast_path_losses, "memory": memory, "sampling": sampling, "checkpoints": checkpoints,
    "drills": drills, "char": char, "installs": installs, "suites": suites, "compact": compact,
    "ramps": ramps}


def pages():
    return [ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_tables(page):
    """Return a page's text with the tables of today's files. Text outside of the markers stays."""

    def block(match):
        name, _, end = match.groups()
        if name not in TABLES:
            exit_with_error(f"{page.name} has a table '{name}': use one of {', '.join(TABLES)}")
        if not end:
            exit_with_error(f"{page.name}: table '{name}' has no end: add <!-- end --> after it")
        rows = TABLES[name]()
        if page.parent != ROOT:
            rows = rows.replace("](results/", "](../results/")
        return f"<!-- table: {name} -->\n{rows}\n<!-- end -->"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


def main():
    texts = {page: with_tables(page) for page in pages()}
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
