"""Which heads carry six word-pair tasks: the ten strongest by average indirect effect, two seeds.

    python figures/head_ranking.py                      (the built-in pairs)
    python figures/head_ranking.py --data FOLDER        (FOLDER/antonym.json and so on)

Todd et al. 2024, section 2.3: template Q:/A:, 10 shots, 100 clean and 25 shuffled prompts. Writes
figures/results/head_ranking.csv, and a heat map a task to out/heads/. Each finished (task, seed) is
kept in out/heads/ and not measured again.
"""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from scipy import stats

import mechtv
from mechtv.files import write_whole
from mechtv.study.store import Store, key_of

TASKS = (
    "antonym",
    "capitalize",
    "country-capital",
    "english-french",
    "present-past",
    "singular-plural",
)
TOP = 10
SETTINGS = {"shots": 10, "n": 100, "n_shuffled": 25}


def main(data: str | None = None, seeds: str = "0,1", out: Path = Path("out/heads")) -> None:
    model = mechtv.open_model()
    out.mkdir(parents=True, exist_ok=True)
    tables = []
    for name in TASKS:
        task = mechtv.get_task(name if data is None else f"{data}/{name}.json")
        task = task.with_template("qa")
        for seed in map(int, seeds.split(",")):
            tables.append(_measured(model, task, name, seed, out))
    table = pd.concat(tables, ignore_index=True)
    top = table[table["rank"] <= TOP].sort_values(["task", "seed", "rank"])
    columns = ["task", "seed", "rank", "layer", "head", "effect", "low", "high", "n"]
    results = Path(__file__).parent / "results"
    write_whole(results / "head_ranking.csv", top[columns].to_csv(index=False).encode())
    write_whole(results / "head_stability.csv", _stability(table).to_csv(index=False).encode())


def _measured(model, task, name: str, seed: int, kept: Path) -> pd.DataFrame:
    """The table of one (task, seed); from its file if it is there."""
    store = Store(kept)
    key = key_of(model, task, method="head effects", **SETTINGS, seed=seed)
    rows = store.rows(key)
    if rows is None:
        effects = mechtv.measure_head_effects(model, task, **SETTINGS, seed=seed)
        figure = mechtv.plots.head_effects(effects)
        figure.write_html(kept / f"{name}-seed{seed}.html")
        rows = effects.table().assign(task=name, seed=seed).to_dict("records")
        store.keep(key, rows)
    return pd.DataFrame(rows)


def _stability(table: pd.DataFrame) -> pd.DataFrame:
    """For each task and pair of seeds Spearman's correlation over all heads, and shared heads.

    Its interval is a bootstrap over heads.
    """
    rows = []
    for task, own in table.groupby("task"):
        by_seed = {seed: part.sort_values(["layer", "head"]) for seed, part in own.groupby("seed")}
        for first, second in combinations(sorted(by_seed), 2):
            a, b = (by_seed[seed]["effect"].to_numpy() for seed in (first, second))
            rng = np.random.default_rng(0)
            draws = [rng.integers(len(a), size=len(a)) for _ in range(2000)]
            spread = [stats.spearmanr(a[d], b[d]).statistic for d in draws]
            tops = [
                {(r.layer, r.head) for r in by_seed[s].itertuples() if r.rank <= TOP}
                for s in (first, second)
            ]
            rows.append(
                {
                    "task": task,
                    "seeds": f"{first}, {second}",
                    "spearman": stats.spearmanr(a, b).statistic,
                    "low": np.quantile(spread, 0.025),
                    "high": np.quantile(spread, 0.975),
                    "heads": len(a),
                    "shared_of_top_ten": len(tops[0] & tops[1]),
                }
            )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    typer.run(main)
