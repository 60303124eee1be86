"""Find the newest intact tag, and load it into an engine of any ZeRO stage and number of ranks."""

import time

import torch
import torch.distributed as dist

from runtime.checkpoint.shards import MOMENTS, TagReader
from runtime.checkpoint.tags import OTHER_TAG, CheckpointError, UnreadableError, topology, verify_files
from runtime.cluster.ranks import RANK, all_gather_objects, broadcast_from_rank0, exit_together, print0, silence_stdout


def newest_intact(store, start, resume_tag="latest", overwrite=False):
    """Return the newest Tag that every rank finds intact, or None if the run doesn't resume. resume_tag: the one tag to
    check, or "latest" for all. Corrupt tags are skipped and added to store.skipped. A tag that can't be read ends the
    search, because an older one would lose work. All ranks call it."""
    # List again on rank 0: the previous run may have saved since, and other machines may see that later
    newest = broadcast_from_rank0(store.newest_first() if RANK == 0 else None)
    if start.kind != "resume":
        exit_together([f"{store.out_dir} now holds a run ({newest[0]}): start again with --init_from=resume or auto"]
                      if newest and not overwrite and not store.read_only else [])
        return None
    began = time.time()
    for name in newest or ["latest"] if resume_tag == "latest" else [resume_tag]:
        tag, unreadable, problems = inspect(store, name)
        exit_together(unreadable)
        if not any(found := all_gather_objects(problems)):
            break
        store.skipped[name] = list(dict.fromkeys(problem for problems in found for problem in problems))
    else:
        exit_together([problem for problems in store.skipped.values() for problem in problems])
    for skipped_name, problems in store.skipped.items():
        print0(f"skipping {store.path(skipped_name)}: {problems[0]}")
    print0(f"resuming from {store.path(name)}, iteration {tag.manifest['iter_num']}; its files were checked in "
           f"{time.time() - began:.1f} s")
    return tag


def inspect(store, name):
    """Return (Tag, messages on what can't be read, messages on what is corrupt)."""
    try:
        tag = store.find(name)
        return tag, [], verify_files(store.path(name), tag.manifest["files"], RANK, dist.get_world_size())
    except OSError as error:
        return None, [str(UnreadableError.of(error, store.path(name)))], []
    except UnreadableError as error:
        return None, [str(error)], []
    except CheckpointError as error:
        return None, [], [str(error)]


def load_into_engine(engine, store, tag):
    """Load a tag's weights, optimizer state and loss scale into the engine, and return the state that save() was given.
    Re-shard them if the number of ranks, the ZeRO stage or the precision has changed. All ranks call it."""
    start, manifest, path = time.time(), tag.manifest, store.path(tag.name)
    was, now = ("{world_size} ranks at ZeRO stage {stage} in {dtype}".format(**one)
                for one in (manifest, topology(engine)))
    if was != now:
        print0(f"re-sharding {path}: saved by {was}, now {now}")
        reshard_into_engine(engine, TagReader(path, manifest))
    else:  # DeepSpeed reads less per rank; keep this run's betas, weight decay and loss scaler
        own = [{key: group[key] for key in ("betas", "weight_decay")} for group in engine.optimizer.param_groups]
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        with silence_stdout():
            loaded, _ = engine.load_checkpoint(store.out_dir, tag=tag.name)
        exit_together([f"DeepSpeed could not load {path}: {OTHER_TAG}"] if loaded is None else [])
        for group, settings in zip(engine.optimizer.param_groups, own):
            group.update(settings)
        if scaler:
            saved, engine.optimizer.loss_scaler = engine.optimizer.loss_scaler, scaler
            restore_loss_scale(scaler, saved)
    dist.barrier()
    print0(f"loaded in {time.time() - start:.1f} s")
    return manifest["state"]


@torch.no_grad()
def reshard_into_engine(engine, reader):
    """Copy a tag's weights, moments, step and loss scale into a new engine. Each rank reads what it needs."""
    stage = engine.zero_optimization_stage()
    init_adam_state(engine, stage, reader.step)
    for name, param in engine.module.named_parameters():
        for field in ("weight", *MOMENTS) if reader.is_trainable(name) else ("weight",):
            flat = reader.get(name, field).flatten()
            for target, offset in local_slices(engine, stage, param, field):
                target.copy_(flat[offset:offset + target.numel()])
    restore_loss_scale(getattr(engine.optimizer, "loss_scaler", None), reader.loss_scaler)
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, reader.model_state[counter])


def restore_loss_scale(scaler, saved):
    """If both loss scalers are dynamic, continue with the saved scale. The window and the like stay this run's."""
    if getattr(scaler, "dynamic", False) and getattr(saved, "dynamic", False):
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            setattr(scaler, name, getattr(saved, name))


def init_adam_state(engine, stage, step):
    """Create the optimizer's state at `step`, with moments of zeros. It would do so itself at its first step."""
    inner = engine.optimizer.optimizer
    flats = (engine.optimizer.fp32_partitioned_groups_flat if stage == 3
             else [param for group in inner.param_groups for param in group["params"]])
    fused = inner.param_groups[0].get("fused")
    for flat in flats:
        count = torch.tensor(step, dtype=torch.float32, device=flat.device if fused else "cpu")
        inner.state[flat] = {field: torch.zeros_like(flat) for field in MOMENTS}
        inner.state[flat]["step"] = count if isinstance(inner, torch.optim.AdamW) else int(step)  # DeepSpeed's are ints


def local_slices(engine, stage, param, field):
    """Return [(flat tensor of this rank, its offset in the parameter)] to fill for one field of a parameter."""
    optimizer, is_weight = engine.optimizer, field == "weight"
    if stage == 3:
        flats = [param.ds_tensor.data] if is_weight else []
        if param.requires_grad:
            key = None if is_weight else field
            flats.append(optimizer._get_fp32_opt_state_partition(param, False, optim_state_key=key)[0])
        start = param.ds_tensor.ds_numel * optimizer._get_param_partition_rank(param)
        slices = [(flat[:max(0, param.ds_numel - start)], start) for flat in flats]  # the rest is padding
        return [(flat, start) for flat, start in slices if flat.numel()]
    slices = [(param.data.view(-1), 0)] if is_weight else []
    mapping = getattr(param, "_hp_mapping", None)
    if mapping is not None:
        flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
        flat = flat.data if is_weight else optimizer.optimizer.state[flat][field]
        address = mapping.get_hp_fragment_address()
        slices.append((flat[address.start:address.start + address.numel], mapping.lp_fragment_address.start))
    return slices
