"""Checks that an edited model or another optimizer computes the same in every way that this project
uses it: with a cache, on kernels, at ZeRO-2 and 3, after a resume.

python doctor.py --model makes all of them. A training run makes the short ones before its first
step.
"""
