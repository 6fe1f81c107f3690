#!/usr/bin/env bash
# One day: the log of the day extends the data, yesterday's policy trains on it, and its bundle takes over if it passes the gate.
#
#   DAY=2026-11-24 LOG='impressions/20261124T*.parquet' ADMIN_KEYS=admin.keys bash day.sh          # every step
#   DAY=2026-11-24 ... bash day.sh compare                                                         # one step
#
# In the current directory, each day has a folder of its name in data/, runs/, evaluations/, candidates/ and comparisons/;
# bundles/ holds only what passed the gate, and `recpo serve --bundle bundles --admin_keys admin.keys` serves it. A step may run
# again. The exit status is that of the step that failed: 3 = the gate refused, and the old bundle continues to serve.
set -euo pipefail

STEPS=(extend warm_start evaluate export compare swap)
: "${DAY:?the name of the day; names sort by time}"
: "${SERVER:=http://localhost:8000}" "${ADMIN_KEYS:=admin.keys}" "${EPOCHS:=2}" "${MAX_LOSS:=0.01}" "${MIN_OVERLAP:=0.3}"

last() { # the last day before today in a folder
    find "$1" -mindepth 1 -maxdepth 1 -type d -name '[!._]*' -printf '%f\n' | sort | awk -v day="$DAY" '$0 < day' | tail -n 1
}

extend() {
    recpo prepare --extends "data/$(last data)" --log "${LOG:?the log of the day}" --out "data/$DAY" --overwrite true
}

warm_start() { # from the last policy that passed the gate; a day whose policy did not is among the replayed data
    recpo train --init_from "runs/$(last bundles)" --data.prepared "data/$DAY" --data.segments newest --data.replay 1.0 \
        --trainer.max_epochs "$EPOCHS" --out "runs/$DAY" --overwrite true
}

evaluate() { # for people: the gate below does not read it
    recpo evaluate --prepared "data/$DAY" --contenders "runs/$DAY" "bundles/$(last bundles)" popularity \
        --out "evaluations/$DAY" --overwrite true
}

export_bundle() {
    recpo export --run "runs/$DAY" --out "candidates/$DAY" --overwrite true
}

compare() { # the gate
    recpo compare --old "bundles/$(last bundles)" --new "candidates/$DAY" --prepared "data/$DAY" --max_loss "$MAX_LOSS" \
        --min_overlap "$MIN_OVERLAP" --out "comparisons/$DAY" --overwrite true
}

swap() { # the server refuses a bundle that does not answer its golden requests; the key is not in the list of processes
    local status=0 moved=
    [[ -d "bundles/$DAY" ]] || { mv "candidates/$DAY" "bundles/$DAY" && moved=yes; }
    printf 'authorization: Bearer %s\n' "$(head -n 1 "$ADMIN_KEYS")" |
        curl --fail-with-body --silent --show-error --max-time 600 --header @- --header 'content-type: application/json' \
            --data "{\"version\": \"$DAY\"}" "$SERVER/v1/admin/swap" || status=$?
    if [[ $status -eq 22 && $moved ]]; then # the server said no
        mv "bundles/$DAY" "candidates/$DAY"
    fi
    return "$status"
}

for step in "${@:-${STEPS[@]}}"; do
    echo "== $DAY: $step" >&2
    case $step in
        export) export_bundle ;; # `export` is a word of the shell
        extend | warm_start | evaluate | compare | swap) "$step" ;;
        *) echo "no step $step: ${STEPS[*]}" >&2 && exit 2 ;;
    esac
done
