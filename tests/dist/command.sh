#!/usr/bin/env bash
# The command on several ranks: results beside those of one process, mistakes as one line, and what becomes of a job that
# loses a rank: an error in bounded time, an exit status that is not 0, no file.
#   command.sh MPIRUN APA COMPARE DUMP
set -euo pipefail

mpirun=$1 apa=$2 compare=$3 dump=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d)
job=
cleanup() {
    [ -z "$job" ] || kill -KILL "$job" 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
cd "$folder"

ranks() {
    local n=$1
    shift
    "$here/mpirun.sh" "$mpirun" "$n" "$apa" "$@" --threads 1
}
fail() { echo "FAILED: $*" >&2; exit 1; }

echo "== results"
"$apa" gen sink-tail --out in --shape 1,4,2,300,2000,64 >/dev/null
files=(--q in/q.npy --k in/k.npy --v in/v.npy)
"$apa" run "${files[@]}" --method exact --out alone.npy --lse alone_lse.npy --threads 1 >/dev/null
for n in 2 3; do
    for queries in sharded whole; do
        ranks $n run "${files[@]}" --method exact --queries $queries --out out.npy --lse lse.npy >said
        grep -q "^engine .* $n ranks" said || fail "no line about $n ranks"
        "$compare" out.npy alone.npy 3e-6
        "$compare" lse.npy alone_lse.npy 1e-6
    done
done
ranks 3 run "${files[@]}" --queries sharded --exchange codes --out out.npy --json figures.json >/dev/null
"$compare" out.npy alone.npy 2e-2
grep -q '"exchange": "codes"' figures.json
grep -q '"per_rank"' figures.json
"$apa" run --dump "$dump" --method exact --out alone.npy --threads 2 >/dev/null
ranks 2 run --dump "$dump" --method exact --queries sharded --out out.npy >/dev/null
"$compare" out.npy alone.npy 3e-6
ranks 2 bench --shape 1,4,2,256,2048,64 --repeats 1 --json - >bench.json
grep -q '"scaling"' bench.json

echo "== mistakes"
wrong() { # STATUS SAYS ARGUMENT ...
    local expected=$1 says=$2 status=0
    shift 2
    rm -f none.npy
    ranks 3 "$@" --out none.npy >out 2>err || status=$?
    [ "$status" = "$expected" ] || fail "$*: exit status $status, expected $expected: $(cat err)"
    [ "$(grep -c '^apa: ' err)" = 1 ] || fail "$*: expected one line: $(cat err)"
    grep -q "^apa: .*$says" err || fail "$*: no \"$says\" in: $(cat err)"
    [ ! -e none.npy ] || fail "$*: an output file"
}
wrong 2 "cannot be opened" run --q in/q.npy --k in/k.npy --v no.npy
wrong 2 "exchange" run "${files[@]}" --exchange most
wrong 2 "engine" run "${files[@]}" --engine none
wrong 2 "not given" run --q in/q.npy

echo "== a rank is lost"
"$apa" gen randn --out large --shape 1,8,2,32768,32768,128 >/dev/null
lose() { # SIGNAL SECONDS
    local start=$SECONDS status=0 victim=
    rm -f lost.npy
    "$here/mpirun.sh" "$mpirun" 3 "$apa" run --q large/q.npy --k large/k.npy --v large/v.npy --method exact --queries sharded \
        --threads 1 --silence 3 --out lost.npy >out 2>err &
    job=$!
    for _ in $(seq 100); do # mpirun's children are the ranks
        victim=$(cat /proc/$job/task/*/children 2>/dev/null | wc -w)
        [ "$victim" -lt 3 ] || break
        sleep 0.1
    done
    sleep 1
    victim=$(cat /proc/$job/task/*/children 2>/dev/null | tr ' ' '\n' | sed -n 2p)
    [ -n "$victim" ] || fail "signal $1: the job had ended before it was sent"
    kill "-$1" "$victim"
    wait "$job" || status=$?
    job=
    [ "$status" != 0 ] || fail "signal $1: exit status 0"
    [ $((SECONDS - start)) -le "$2" ] || fail "signal $1: $((SECONDS - start)) s, expected at most $2"
    [ -s err ] || fail "signal $1: nothing said"
    [ ! -e lost.npy ] || fail "signal $1: an output file"
    compgen -G 'lost.npy*' >/dev/null && fail "signal $1: a temporary file"
    echo "signal $1: exit status $status after $((SECONDS - start)) s: $(grep -m 1 -E '^apa: |signal' err)"
}
lose KILL 30
lose STOP 30
grep -q "no sign of life" err || fail "signal STOP: $(cat err)"
