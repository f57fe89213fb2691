#!/usr/bin/env bash
# What one NVIDIA GPU says of drafts for LLaMA-65B; offline, each part within nine minutes, all within --minutes (25).
#   bash benchmarks/gpu.sh [--small] [--out DIR] [--minutes N] [PART ...]
#   PART: machine tests ceilings live sweep target drafts served predict live_text engine score loss masks
# --small: small shapes on whatever device is there, to try the script. Results: DIR/PART.json, benchmarks/results/gpu if
# left out; DIR/clocks.csv has the GPU's clocks, power and temperature every five seconds, DIR/starts.csv when each part
# began. A part that fails, or for which no time is left, leaves DIR/PART.failed with its last words, and the others run.
# In target and predict the 65B target is extrapolated by a latency law from its first 1 to 10 layers, as one GPU rarely
# holds it; live decodes with all of it where it fits (one H200), else with its first layers; live_text with tiny's text
# at its cost. On one H200 live took 130 seconds, target 60, drafts 85 and sweep 20. python -m benchmarks.gpu_prediction
# compares live with predictions; docs/pages read copies, such as benchmarks/results/h200_live.json.
set -uo pipefail

small= out=benchmarks/results/gpu minutes=25 parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --small) small=yes ;;
    --out) out=$2; shift ;;
    --minutes) minutes=$2; shift ;;
    *) parts+=("$1") ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=(machine tests ceilings live sweep target drafts served predict live_text engine score loss masks)

cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
draftlab="$python -m draftlab"
mkdir -p "$out" runs/gpu

device=cuda mode=graphs
if [ $small ]; then
  $python -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || device=cpu mode=eager
  sweep="--params 4.5m --source tiny-16x256 --layers 3,4,6 --passes 3"
  target=tiny-16x256 depths="1 2 3 4 5 6" target_law="--context 8,64 --repeats 3 --threads 1"
  drafts="tiny-3x256 tiny-12x128" models="tiny-16x256 tiny-3x256" points="--context 8,64 --repeats 3 --threads 1" text="--context 16 --max-new-tokens 16"
  engine="--prompts 1 --new-tokens 8" larger="--layers 17 --width 320"
  loss="--tokens 64 --hidden 32 --teacher-hidden 32 --top-k 8 --repeats 1 --losses fkl" vocabs=256
  masks=1 gigabytes=0.02
  live="--target tiny-16x256 --drafts tiny-3x256,tiny-12x128 --k 1,3 --alphas 0.5,0.9 --coin 0.5 --prompt-tokens 16 --new-tokens 12 --dtype float32 --room 1e8"
  live_text="--target tiny-16x256 --drafts tiny-16x256 --k 1,3 --prompts 1 --prompt-tokens 16 --new-tokens 12 --dtype float32 --room 1e8"
else
  sweep="--passes 60 --dtype bfloat16"
  target=llama-65b depths="1 2 4 6 8 10" target_law="--context 128,512 --repeats 20"
  models="qwen3-32b qwen3-0.6b llama-3.1-8b llama-3.2-1b"
  drafts="noft-1.3b wide-1.3b wide-796m wide-543m wide-290m" points="--context 128,512 --repeats 20"
  text="--context 128 --max-new-tokens 128" engine= larger="--layers 24 --width 2048 --params 1.3b" masks=12 gigabytes=1
  loss="--tokens 4096 --hidden 2048 --teacher-hidden 4096 --dtypes bfloat16 --losses fkl,tvd,lk(3)" vocabs="32000 128256"
  live= live_text=
fi

part() {  # NAME COMMAND...: its JSON into NAME.json, or the end of what it said into NAME.failed
  local name=$1 left=$((60 * minutes - SECONDS))
  shift
  echo "$name: $*" >&2
  rm -f "$out/$name.failed"
  echo "$name, $(date '+%Y/%m/%d %T')" >> "$out/starts.csv"
  if [ $left -le 0 ]; then
    echo "$minutes minutes are over" | tee "$out/$name.failed" >&2
    failed+=("$name")
    return
  fi
  if timeout -k 10 $((left < 540 ? left : 540)) "$@" > "$out/$name.tmp" 2> >(tee "$out/$name.log" >&2); then
    mv "$out/$name.tmp" "$out/$name.json"
    rm -f "$out/$name.log"
  else
    echo "$name failed with $?" >&2
    tail -n 40 "$out/$name.log" "$out/$name.tmp" > "$out/$name.failed"
    rm -f "$out/$name.tmp" "$out/$name.log"
    failed+=("$name")
  fi
}

machine() { part machine $python -m benchmarks.gpu_machine; }

tests() { [ $device = cpu ] || part tests $python -m benchmarks.gpu_machine --tests; }

ceilings() { part ceilings $python -m benchmarks.ceilings --device $device --gigabytes $gigabytes; }

sweep() {
  local modes=eager
  [ $device = cuda ] && modes=eager,graphs
  part sweep $python -m benchmarks.depth_sweep $sweep --device $device --modes $modes --plot "$out/sweep.svg"
}

target() {  # the first layers of the target
  local shapes=()
  mkdir -p runs/gpu/shapes
  for n in $depths; do
    sed "s/^layers: .*/layers: $n/" "configs/widths/$target.yaml" > "runs/gpu/shapes/depth-$n.yaml"
    shapes+=("runs/gpu/shapes/depth-$n.yaml")
  done
  part target $draftlab profile "${shapes[@]}" --law $target_law --k 6 --mode $mode --out runs/gpu/target --force --json
}

drafts() {
  part drafts $draftlab profile $drafts --k 1 $points --mode $mode --out runs/gpu/drafts --force --json
  [ $mode = eager ] || part drafts_eager $draftlab profile $drafts --k 1 $points --mode eager --out runs/gpu/drafts-eager --force --json
}

served() {  # targets that people serve, and small siblings of theirs
  part served $draftlab profile $models --k 8 $points --mode $mode --out runs/gpu/served --force --json
}

predict() {  # needs target and drafts
  local profiles=()
  for name in $drafts; do profiles+=(--draft-profile "runs/gpu/drafts/$name.yaml"); done
  for length in 2 2.5 3 3.5 4; do
    part "predict_$length" $draftlab predict "${profiles[@]}" --target-profile "$target@runs/gpu/target" --k 1-6 $text \
      --acceptance "$length@6" --json
  done
}

live() { part live $python -m benchmarks.large_target $live --device $device --mode $mode; }

cut() {  # a draft of tiny, for live_text and engine
  [ -d runs/gpu/3x256 ] || part cut $draftlab prune --source tiny --layers 3 --width 256 --data stdlib \
    --calibration-tokens 4096 --out runs/gpu/3x256 --json
}

live_text() {
  cut
  part live_text $python -m benchmarks.expanded_target --cut runs/gpu/3x256 $live_text --device $device --mode $mode
}

engine() {
  cut
  part engine_target $python -m benchmarks.expand tiny runs/gpu/tiny-larger $larger
  part engine $python -m benchmarks.engine --draft runs/gpu/3x256 --device $device $engine
  part engine_larger $python -m benchmarks.engine --target runs/gpu/tiny-larger --draft runs/gpu/3x256 --device $device $engine
}

score() {  # what is timed, what is predicted, and how far predictions are off on this GPU
  cut
  part score $draftlab score --target tiny --draft runs/gpu/3x256 --drafter latest-lookup --data stdlib --num-prompts 8 \
    --max-new-tokens 48 --device $device --mode $mode --out runs/gpu/score --force --json
}

loss() {
  for vocab in $vocabs; do part "loss_$vocab" $python -m benchmarks.distill_loss $loss --vocab $vocab; done
}

masks() { part masks $python -m benchmarks.prune_stream --folder runs/gpu/masks --no-seven-b --mask-steps $masks; }

if [ $device = cuda ]; then  # while a part runs: a GPU slows its clocks as soon as it is idle
  nvidia-smi --query-gpu=timestamp,index,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active \
    --format=csv --loop=5 >> "$out/clocks.csv" &
  trap "kill $! 2> /dev/null" EXIT
fi
failed=()
for name in "${parts[@]}"; do $name; done
ls "$out"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
