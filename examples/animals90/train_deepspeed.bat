@echo off
rem Nobody has tried this file. DeepSpeed needs NCCL, which Windows does not have: WSL2 runs the Linux version.
cd /d "%~dp0"
wsl bash train_deepspeed.sh %*
