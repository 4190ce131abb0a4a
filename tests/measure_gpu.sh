#!/usr/bin/env bash
# The measurements of nbs/results that need GPUs, as calls of under ten minutes each.
#   DATA_PATH=... TOKENIZER_PATH=... OUT=folder NPROC=2 tests/measure_gpu.sh PART ...
# Parts: one (kernels, attention, compiler options; one GPU), faults (recipes, cap, faults), parity (two seeds as 8 ranks clip),
# bench (step, phases, trace, start-up), scale (1, 2, ... NPROC ranks), eval (scoring and adapting), links (links, plans, baselines),
# any (any model), gates, dtypes, averaging, golf_parts, golf_seconds (chapter 34's trainings; SMALL=1: a quarter of the batch), blocks (loader against a resident batch),
# long (LONG_STEPS, 1,500, steps, two seeds, with and without QAT, then the curve of loss against bytes, and every form of TTT), orders (loader orders on the corpus cut anew).
# Results land in $OUT; copy the .json files into nbs/results. A part that fails does not stop the others.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1 MAX_WALLCLOCK_SECONDS=0 RECIPE=pr549 RUNS_DIR="${RUNS_DIR:-/tmp/golfnb_runs}"
OUT=${OUT:-out} NPROC=${NPROC:-$(python3 -c "import torch; print(torch.cuda.device_count())")}
export OUT NPROC
mkdir -p "$OUT" "$RUNS_DIR"
begun=$(date +%s)
say() { echo "=== $* at $(($(date +%s) - begun)) s"; }
bench() { say "bench $*"; what=$1; shift; python3 -m golfnb.cli bench "$what" -o "$OUT/${name:-${what}_h200_$NPROC}.json" "$@" > "$RUNS_DIR/$what.log" 2>&1 || tail -5 "$RUNS_DIR/$what.log"; tail -"${lines:-12}" "$RUNS_DIR/$what.log"; }

one() {
  NPROC=1
  say tests; python3 -m pytest -q -m gpu tests/test_engine.py tests/test_kernels.py tests/test_any_model.py 2>&1 | tail -3
  bench attention
  lines=40 bench kernels --sets plain heads+xsa+fold+mlp heads+xsa+fold+mlp+graph
}
faults() { say faults; python3 -m golfnb.trials jobs "$NPROC" "$RUNS_DIR/faults" clock nan kill truncate pr399 pr726 "$@"; cp "$RUNS_DIR/faults/trials.json" "$OUT/trials.json"; }
parity() { say parity; python3 -m golfnb.trials jobs "$NPROC" "$RUNS_DIR/parity" first1337 first42 parity1337 parity42 "$@"; cp "$RUNS_DIR/parity/trials.json" "$OUT/firsts.json"; for run in 1337 42; do cp "$RUNS_DIR/parity/runs/parity$run/summary.json" "$OUT/parity${run}_summary.json"; cp "$RUNS_DIR/parity/runs/parity$run/metrics.jsonl" "$OUT/parity${run}_metrics.jsonl"; done; }
bench_all() { bench step --nproc "$NPROC" --against STEP_GRAPH=0; bench phases --nproc "$NPROC"; bench trace --nproc "$NPROC"; bench startup --nproc "$NPROC" --rounds 1; }
scale() { bench scaling --nproc "$NPROC"; }
eval_all() { bench eval --nproc "$NPROC"; }
links() { bench links --nproc "$NPROC"; lines=40 bench optimizer --nproc "$NPROC" --steps 30 --links "$OUT/links_h200_$NPROC.json"; }
one_run() {  # seed, qat, GPU: one training of `long`
  SEED=$1 QAT_BANKS=$2 CUDA_VISIBLE_DEVICES=$3 RUN_ID=long_$1_$2 RECIPE=golf ITERATIONS=${LONG_STEPS:-1500} WARMDOWN_ITERS=$((${LONG_STEPS:-1500} * 2 / 5)) TRAIN_LOG_EVERY=100 VAL_LOSS_EVERY=250 TTT_ENABLED=0 EVAL_STRIDE="${EVAL_STRIDE:-1024}" torchrun --standalone --nproc_per_node=1 golfnb/train_gpt.py > "$RUNS_DIR/long_$1_$2.log" 2>&1
  tail -3 "$RUNS_DIR/long_$1_$2.log"
}
long() {  # one GPU a run, as many at a time as there are GPUs
  say long; i=0
  for seed in 1337 42; do for qat in 0 1; do
    one_run $seed $qat $((i % NPROC)) & i=$((i + 1))
    [ $((i % NPROC)) -ne 0 ] || wait
  done; done
  wait
  say curve; python3 -m golfnb.trials curve "$RUNS_DIR"/long_*
  say scores; python3 -m golfnb.trials scores "$RUNS_DIR"/long_*_0
}
orders() { say orders; python3 -m golfnb.cli data recut "$DATA_PATH/fineweb_train_*.bin" --out /tmp/recut --shards "${SHARDS:-128}" && cp "$DATA_PATH"/fineweb_val_*.bin /tmp/recut && study orders DATA_PATH=/tmp/recut; }
blocks() { say blocks; study blocks LOADER=coprime STUDY_BLOCK_STEPS="${STUDY_BLOCK_STEPS:-50}"; }
any() { say any; OUT=$OUT torchrun --standalone --nproc_per_node="$NPROC" tests/study_any_model.py; }
study() { python3 -m golfnb.studies "$1" NPROC="$NPROC" "${@:2}"; }

[ -z "${SMALL:-}" ] || export TRAIN_BATCH_TOKENS=196608
for part in "$@"; do
  case $part in one|faults|parity|scale|links|long|orders|blocks|any) $part ;; gates|dtypes|averaging|golf_parts|golf_seconds) say "$part"; study "$part" ;; bench) bench_all ;; eval) eval_all ;; *) echo "no such part: $part"; exit 2 ;; esac
done
say end
