"""Files of others: what is opened, what is refused, and what is never written to."""


import os
import shutil
import stat
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, launch, small_manifest

from runtime.checkpoint.errors import CheckpointError
from runtime.checkpoint.manifest import check_bytes, check_manifest, sign_manifest
from runtime.checkpoint.tags import TagStore
from runtime.errors import UserError
from runtime.files import lock_folder, private_temp_dir, remove_dir, use_private_compile_cache
from runtime.monitor import history
from runtime.monitor.wandb_settings import check_wandb_settings
from runtime.output import exit_with_error
from runtime.untrusted import (
    UnsafeFileError,
    check_type,
    is_private_dir,
    open_regular,
    parse_json,
    read_json,
    read_regular,
)


def pipe(path):
    os.mkfifo(path)


def link_to_zeros(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, link_to_zeros], ids=["a pipe", "a device"])
def test_what_would_hang_is_refused(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(UnsafeFileError, match="is a pipe or a device"):
        open_regular(tmp_path / "file")


def test_sizes_and_links(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", max_bytes=5) == b"12345"
    with pytest.raises(UnsafeFileError, match="has 5 bytes, and at most 4 are plausible"):
        read_regular(tmp_path / "file", max_bytes=4)
    with pytest.raises(UnsafeFileError, match="is a link, which is not followed here"):
        read_regular(tmp_path / "link", follow_links=False)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_json_that_is_too_deep_or_has_giant_numbers():
    assert parse_json("[" * 50 + "]" * 50)
    for text, why in {
        "[" * 51 + "]" * 51: "nested more than 50 deep",
        "[" * 10**6: "nested more than 50 deep",
        '{"a": ' * 60 + "1" + "}" * 60: "nested more than 50 deep",
        "1" * 41: "a number of 41 digits",
        "1" * 10**5: "a number of 100000 digits",
    }.items():
        with pytest.raises(ValueError, match=why):
            parse_json(text)


def test_a_type_is_strict_and_names_the_key(tmp_path):
    (tmp_path / "file").write_text('{"a": [1, true]}')
    assert read_json(tmp_path / "file", dict[str, list]) == {"a": [1, True]}
    with pytest.raises(UnsafeFileError, match="a.1 is True: Input should be a valid integer"):
        read_json(tmp_path / "file", dict[str, list[int]])
    with pytest.raises(ValueError, match="its content is '1'"):
        check_type("1", int)


def broken(*path, value):
    """A manifest in which one value is another."""
    manifest = small_manifest(5)
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return manifest


@pytest.mark.parametrize(
    "manifest, why",
    [
        (broken("state", value=[]), "state is []"),
        (broken("state", "model", "n_embd", value=10**9), "state.model.n_embd is 1000000000"),
        (broken("state", "model", "n_layer", value=5000), "state.model.n_layer is 5000"),
        (broken("state", "model", "n_head", value="2"), "state.model.n_head is '2'"),
        (broken("state", "best_val_loss", value=float("nan")), "state.best_val_loss is nan"),
        (broken("state", "wandb_id", value="../x"), "state.wandb_id is '../x'"),
        (broken("state", "sequences", value=-1), "state.sequences is -1"),
        (broken("state", "sequences", value=2**62), f"state.sequences is {2**62}"),
        (broken("state", "sequences", value=4), "state.sequences is 4, fewer than one for each of the 5 iter"),
        (broken("iter_num", value=True), "iter_num is True"),
        (broken("iter_num", value=-1), "iter_num is -1"),
        (broken("world_size", value=0), "world_size is 0"),
        (broken("files", "../../etc/hostname", value={"bytes": 1, "sha256": "0" * 64}), "files"),
        (broken("files", "x_model_states.pth", value={"bytes": 1, "sha256": "0" * 64}), "files"),
        (broken("files", value={}), "files is {}"),
        (broken("tag", value="iter_1/.."), "tag is 'iter_1/..'"),
    ],
    ids=str,
)
def test_a_manifest_of_others_is_checked(tmp_path, manifest, why):
    check_manifest(small_manifest(5) | {"manifest_sha256": "0" * 64})
    (tmp_path / "iter_5").mkdir()
    (tmp_path / "iter_5" / "manifest.json").write_text(sign_manifest(manifest))
    with pytest.raises(CheckpointError) as error:
        TagStore(tmp_path).find("iter_5")
    assert f"iter_5/manifest.json can't be used ({why}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def private(tmp_path):
    """A file of the user, to which links of others lead. It must not change."""
    folder = tmp_path / "home"
    folder.mkdir()
    file = folder / "private"
    file.write_text("private\n")
    yield file
    assert file.read_text() == "private\n"
    assert os.listdir(folder) == ["private"]


def test_the_lock_truncates_nothing_and_follows_no_link(tmp_path, private):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(private)
    with pytest.raises(UserError, match=".lock is a link, and writing would change its target"):
        lock_folder(tmp_path / "out", "--out_dir")
    (tmp_path / "out" / ".lock").unlink()
    (tmp_path / "out" / ".lock").write_text("kept")
    lock_folder(tmp_path / "out", "--out_dir").close()
    assert (tmp_path / "out" / ".lock").read_text() == "kept"


def test_the_history_follows_no_link(tmp_path, private):
    for target in (private, private.with_name("new")):
        link = tmp_path / "history.jsonl"
        link.symlink_to(target)
        with pytest.raises(UserError, match="history.jsonl is a link"):
            history.append_history(str(tmp_path), {"iter": 1})
        with pytest.raises(UserError, match="history.jsonl is a link"):
            history.read_history(str(tmp_path))
        link.unlink()


def test_the_picture_of_a_plot_replaces_a_link(tmp_path, private):
    (tmp_path / "history.jsonl").write_text('{"iter": 1, "loss": 2.5}\n')
    (tmp_path / "curves.png").symlink_to(private)
    run = launch(ROOT / "plot.py", tmp_path)
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "curves.png").is_symlink()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_save_replaces_links(train, tmp_path, private):
    """Links that lead to the user's file, where a run saves: each is replaced or removed."""
    out_dir = tmp_path / "out"
    (out_dir / "iter_2.saving").mkdir(parents=True)
    names = ("latest", "settings.json", "zero_to_fp32.py", "iter_2.saving/manifest.json")
    for name in (*names, "iter_2.saving/mp_rank_00_model_states.pt"):
        (out_dir / name).symlink_to(private)
    (out_dir / "iter_4.saving").symlink_to(private.parent)
    (out_dir / "profile").mkdir()
    (out_dir / "profile" / "flops.txt").symlink_to(private)
    run = train("--profile=True", "--max_iters=7", out_dir=out_dir)
    assert run.returncode == 0, run.stderr
    assert [*run.losses] == [1, 2, 3, 4, 5, 6, 7]
    assert not [path for path in out_dir.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize(
    "line",
    ["[" * 10**5, '{"iter": ' + "9" * 400 + "}", '{"iter": "1"}', '{"iter": true}', "[1]", "NaN"],
    ids=lambda line: line[:12],
)
def test_lines_of_a_history_that_are_no_records(tmp_path, capsys, line):
    lines = ['{"iter": 1, "loss": 2.5}', line, '{"iter": 2, "loss": 1e999}']
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    records = history.read_history(str(tmp_path))
    assert [record["iter"] for record in records] == [1, 2]
    assert history.series(records, "loss") == [(1, 2.5)]
    assert capsys.readouterr().err == (
        f"{tmp_path}/history.jsonl: skipping line 2, which is not a complete record\n"
    )


def test_a_folder_of_folders_is_removed_or_said(tmp_path):
    (tmp_path / "few" / "folder").mkdir(parents=True)
    remove_dir(tmp_path / "few")
    assert os.listdir(tmp_path) == []

    os.mkdir(tmp_path / "many")
    before = os.getcwd()
    os.chdir(tmp_path / "many")
    for _ in range(1500):
        os.mkdir("folder")
        os.chdir("folder")
    os.chdir(before)
    try:
        remove_dir(tmp_path / "many", ignore_errors=True)
        if sys.version_info < (3, 13):  # from then on, shutil.rmtree removes any depth
            with pytest.raises(OSError, match="its folders are nested too deep"):
                remove_dir(tmp_path / "many")
        else:
            assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "many"], check=True)


def test_a_tag_has_a_size_that_fits_its_model():
    """20 bytes per parameter are usual, and 1,024 are taken."""
    manifest = small_manifest(2)
    (name, entry), *_ = manifest["files"].items()
    most = 100_000_000 + 1024 * (60 * 32 + 12 * 2 * 32**2)
    entry["bytes"] = most
    check_bytes(manifest)
    entry["bytes"] = most + 1
    with pytest.raises(ValueError, match="its files have 127,131,905 bytes, and at most 127,131,904"):
        check_bytes(manifest)
    manifest["state"]["elements"] = 60 * 32 + 12 * 2 * 32**2 + 1  # as in a model with more than its sizes say
    check_bytes(manifest)


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_wandb_settings_of_others_send_no_key_elsewhere(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    check_wandb_settings()
    path = tmp_path / folder / "settings"
    path.parent.mkdir()
    path.write_text("[default]\nmode = offline\nproject = mine\n")
    check_wandb_settings()

    for text, words in {
        "[default]\nmode = offline\nBASE_URL = http://192.0.2.1\n": "sets base_url, and may send",
        "[DEFAULT]\napi_key = x\n[default]\nhttp_proxy: x\n": "sets api_key, http_proxy, and",
        "base_url = http://192.0.2.1\n": "is not a file of settings: remove it",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            check_wandb_settings()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnsafeFileError, match="is a pipe or a device"):
        check_wandb_settings()


def test_a_run_that_logs_to_wandb_reads_its_settings_first(train, tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    run = train("--wandb_log=True", WANDB_DIR=str(tmp_path), WANDB_API_KEY="0" * 40)
    assert run.returncode == 2
    assert f"{tmp_path}/wandb/settings sets base_url, and may send your key" in run.stderr


def test_errors_are_short(capsys):
    with pytest.raises(SystemExit) as exit:
        exit_with_error("a" * 5000 + "\n" + "b" * 4000 + "\x1b")
    assert exit.value.code == 2
    assert capsys.readouterr().err == "a" * 4000 + "...\n" + "b" * 4000 + "...\n"


def test_escapes_of_others_do_not_reach_the_terminal(train, whole, tmp_path):
    """The name of a folder is one of the texts that a run prints."""
    out_dir = tmp_path / "out\x1b]0;title\x07"
    run = train("--init_from=resume", out_dir=out_dir)
    assert run.returncode == 2
    assert "\x1b" not in run.stderr + run.stdout
    assert r"out\x1b]0;title\x07" in run.stderr
    run = train(out_dir=out_dir)
    assert run.returncode == 0
    assert "\x1b" not in run.stderr + run.stdout
    assert r"out\x1b]0;title\x07/iter_4" in run.stdout


def test_folders_that_others_can_change(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = private_temp_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    use_private_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/torchinductor"

    for mode in (0o722, 0o750):
        folder.chmod(mode)
        with pytest.raises(UserError, match="is not a folder that only you can open"):
            private_temp_dir()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(UserError, match="is not a folder that only you can open"):
        private_temp_dir()
    assert is_private_dir(elsewhere)
    tmp_path.chmod(0o777)  # not sticky: another user could put a folder in its place
    assert not is_private_dir(elsewhere)
    tmp_path.chmod(0o1777)
    assert is_private_dir(elsewhere)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    os.chown(private_temp_dir(), 65534, 65534)
    with pytest.raises(UserError, match="remove it, or set TMPDIR to a folder of your own"):
        private_temp_dir()




@pytest.mark.long
def test_the_prepare_py_of_a_folder_of_others_does_not_run(characters, tmp_path):
    """It is below data/, has its tokens, and no meta.json, as a folder prepared by nanoGPT."""
    project = tmp_path / "project"
    for name in ("runtime", "config", "data/shakespeare"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("*.bin"))
    for file in [*ROOT.glob("*.py"), *ROOT.glob("*.json")]:
        shutil.copy(file, project)
    folder = shutil.copytree(characters, project / "data" / "theirs")
    for complete in (True, False):
        (folder / "prepare.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
        command = [sys.executable, project / "launch_deepspeed.py", "--headline"]
        command += [*SMALL, "--dataset=theirs", "--dry_run=True", f"--out_dir={tmp_path}/out"]
        run = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert run.returncode == (0 if complete else 2), run.stderr
        assert "Traceback" not in run.stderr
        assert "theirs/prepare.py" not in run.stderr, "no message tells the user to run it"
        assert not (tmp_path / "mark").exists()
        (folder / "meta.json").unlink(missing_ok=True)
        (folder / "train.bin").unlink(missing_ok=True)


@pytest.mark.parametrize("ambiguous", [True, False])
def test_a_config_of_the_working_directory_does_not_stand_in_for_the_projects(tmp_path, ambiguous):
    (tmp_path / "config").mkdir()
    name = "xl_shakespeare.py" if ambiguous else "mine.py"
    (tmp_path / "config" / name).write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    command = [sys.executable, ROOT / "train_deepspeed.py", f"config/{name}", "--batch_size=0.5"]
    run = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert (tmp_path / "mark").exists() != ambiguous
    told = f"config file config/{name} is in the working directory and in the project: write ./config/{name}"
    assert (told in run.stderr) == ambiguous
