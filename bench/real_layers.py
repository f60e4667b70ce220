#!/usr/bin/env python3
"""Runs `apa eval` over a folder of dumps and prints a Markdown table: one row a dump, adaptive against all-cold.

Usage: bench/real_layers.py DUMPS... [--apa build/apa] [--set key=value ...] [--json OUT]

Every figure is over all (row, head) pairs, against exact attention in double. A row is marked where it misses the project's
aim for the default recipe: relative L2 at most 2e-3 and at most a quarter of all-cold's, smallest cosine at least 0.999, hot
share at most 15 %."""
import argparse
import json
import os
import subprocess
import sys


def evaluate(apa, dump, settings, threads):
    command = [apa, "eval", "--dump", dump, "--compare", "apa,cold", "--json", "-"]
    for setting in settings:
        command += ["--set", setting]
    if threads:
        command += ["--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{dump}: apa eval failed: {done.stderr.strip()}")
    results = json.loads(done.stdout)
    return {result["method"]: result for result in results}


def misses(apa, cold):
    found = []
    if not apa["rel_l2"] <= 2e-3:
        found.append("rel L2")
    if not apa["rel_l2"] <= cold["rel_l2"] / 4:
        found.append("a quarter of cold")
    if not apa["min_cos"] >= 0.999:
        found.append("min cos")
    if not apa["hot_share"] <= 0.15:
        found.append("hot")
    return ", ".join(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+")
    parser.add_argument("--apa", default="build/apa")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    print("| dump | apa rel L2 | worst pair | min cos | hot | cold rel L2 | min cos | apa/cold | misses |")
    print("|---|---|---|---|---|---|---|---|---|")
    everything = {}
    for dump in options.dumps:
        results = evaluate(options.apa, dump, options.settings, options.threads)
        everything[os.path.basename(dump)] = results
        apa, cold = results["apa"], results["cold"]
        print(f"| {os.path.basename(dump).removesuffix('.dump')} | {apa['rel_l2']:.1e} | {apa['rel_l2_max']:.1e} "
              f"| {apa['min_cos']:.6f} | {100 * apa['hot_share']:.1f} % | {cold['rel_l2']:.1e} | {cold['min_cos']:.4f} "
              f"| {apa['rel_l2'] / cold['rel_l2']:.3f} | {misses(apa, cold)} |", flush=True)
    if options.json:
        with open(options.json, "w") as out:
            json.dump(everything, out, indent=1)


if __name__ == "__main__":
    main()
