"""Other libraries on tensors: each of these calls is made on numpy's arrays and on tensors of them,
and gives the same values.

`python -m tests.test_interoperability` writes the cases as the table of docs/interoperability.md. A
case is skipped where its library is not installed.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml

os.environ.setdefault("SCIPY_ARRAY_API", "1")  # SciPy reads it when it is imported

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "interoperability.md"
BEGIN: Final = "<!-- written by python -m tests.test_interoperability -->\n"
END: Final = "<!-- end -->\n"

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A call of a library on arrays. `gives` is what comes of tensors: tensors, numpy's arrays,
    numbers, or something of the library's own."""

    library: str
    name: str
    call: Callable[..., Any]
    arrays: Arrays
    gives: str = "tensors"
    group: str = ""
    close: float = 1e-5

    @property
    def id(self) -> str:
        return f"{self.library}: {self.group} {self.name}"


RNG: Final = np.random.default_rng(0)
X: Final = RNG.normal(size=(20, 4))
V: Final = np.abs(RNG.normal(size=32)) + 0.1
W: Final = RNG.normal(size=32)
F: Final = RNG.normal(size=(2, 3, 4)).astype(np.float32)
M: Final = F[0, :, :3]
S: Final = M @ M.T + np.eye(3, dtype=np.float32)
SAMPLES: Final = RNG.normal(size=(60, 5)).astype(np.float32)
LABELS: Final = (SAMPLES[:, 0] + SAMPLES[:, 1] > 0).astype(np.int64)
GUESSES: Final = (SAMPLES[:, 0] > 0).astype(np.int64)
TARGETS: Final = SAMPLES @ np.arange(5, dtype=np.float32)


class Library:
    """A library, imported when an attribute of it is first read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.name), attribute)


compat, xpx = Library("array_api_compat"), Library("array_api_extra")
einops, of_array_api, opt_einsum = map(Library, ("einops", "einops.array_api", "opt_einsum"))
images, pd, torch, jnp = map(Library, ("PIL.Image", "pandas", "torch", "jax.numpy"))


def rows(library: str, table: list[tuple[Any, ...]], *arrays: Any, gives: str) -> list[Case]:
    """Return the cases of a table of names, calls, and arrays where they are others than these."""
    return [Case(library, name, call, tuple(own) or arrays, gives) for name, call, *own in table]


TO_3: Final = np.array([0, 1, 2], np.float32)
FROM_1: Final = TO_3 + 1
AGAIN: Final = np.array([3, 1, 3])
PIXELS: Final = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
NAMESPACES = ("mlvm", "array_api_compat")


def of_namespace() -> list[Case]:
    """array-api-compat and array-api-extra: what they say of a tensor, and what they compute."""
    of_compat: list[tuple[Any, ...]] = [
        (
            "array_namespace",
            lambda x: compat.array_namespace(x).__name__.partition(".")[0] in NAMESPACES,
        ),
        ("is_array_api_obj", lambda x: compat.is_array_api_obj(x)),
        ("size", lambda x: compat.size(x)),
    ]
    moved = ("to_device", lambda x: compat.to_device(x, compat.device(x)))
    of_extra: list[tuple[Any, ...]] = [
        ("angle", lambda x: xpx.angle(x * (1 + 1j))),
        ("apply_where", lambda x: xpx.apply_where(x > 0, x, lambda a: a * 2, lambda a: a)),
        ("argpartition", lambda x: xpx.argpartition(x, 1)[1:2]),
        ("at", lambda x: xpx.at(x)[x > 0].set(5.0)),
        ("at", lambda x: xpx.at(x)[0].add(5.0)),
        ("at", lambda x: xpx.at(x, 1).multiply(5.0)),
        ("atleast_nd", lambda x: xpx.atleast_nd(x, ndim=3)),
        ("cov", lambda x: xpx.cov(x), M),
        ("create_diagonal", lambda x: xpx.create_diagonal(x, offset=1)),
        ("deg2rad", lambda x: xpx.deg2rad(x)),
        ("isclose", lambda x: xpx.isclose(x, x + 1e-9)),
        ("isin", lambda x: xpx.isin(x, x[:1])),
        ("kron", lambda x: xpx.kron(x, x), M),
        (
            "lazy_apply",
            lambda x: xpx.lazy_apply(np.sin, x, shape=x.shape, dtype=x.dtype, as_numpy=True),
        ),
        ("nan_to_num", lambda x: xpx.nan_to_num(x / x), TO_3),
        ("nanmax", lambda x: xpx.nanmax(x / x), TO_3),
        ("nanmean", lambda x: xpx.nanmean(x / x), TO_3),
        ("nunique", lambda x: xpx.nunique(x), AGAIN),
        ("one_hot", lambda x: xpx.one_hot(x, 4), AGAIN),
        ("pad", lambda x: xpx.pad(x, 2, constant_values=1.0)),
        ("partition", lambda x: xpx.partition(x, 1)[1:2]),
        ("searchsorted", lambda x: xpx.searchsorted(x, x), FROM_1),
        ("setdiff1d", lambda x: xpx.setdiff1d(x, x[:1]), FROM_1),
        ("sinc", lambda x: xpx.sinc(x)),
        ("nanmin", lambda x: xpx.nanmin(x / x), TO_3),
        ("nansum", lambda x: xpx.nansum(x / x), TO_3),
        ("rad2deg", lambda x: xpx.rad2deg(x)),
        ("diag_indices", lambda x: xpx.diag_indices(3, xp=compat.array_namespace(x))),
        ("tril_indices", lambda x: xpx.tril_indices(3, xp=compat.array_namespace(x))),
        ("triu_indices", lambda x: xpx.triu_indices(3, xp=compat.array_namespace(x))),
        ("unravel_index", lambda x: xpx.unravel_index(x, (2, 4)), np.array([3, 5])),
        ("union1d", lambda x, y: xpx.union1d(x, y), M[0], M[1]),
    ]
    return [
        *rows("array_api_compat", of_compat, F, gives="numbers"),
        *rows("array_api_compat", [moved], F, gives="tensors"),
        *rows("array_api_extra", of_extra, M[0], gives="tensors"),
    ]


def of_einops() -> list[Case]:
    """einops and opt_einsum: functions of a tensor to tensors, which a capture can hold."""
    of_x: list[tuple[Any, ...]] = [
        ("rearrange", lambda x: einops.rearrange(x, "a b c -> c (a b)")),
        ("rearrange", lambda x: einops.rearrange(x, "a (b d) c -> d a b c", d=3)),
        *(
            ("reduce", lambda x, by=by: einops.reduce(x, "a b (c d) -> b d", by, d=2))
            for by in ("mean", "sum", "max", "min", "prod")
        ),
        ("repeat", lambda x: einops.repeat(x, "a b c -> a (d b) c e", d=2, e=3)),
        ("einsum", lambda x: einops.einsum(x, x, "a b c, a d c -> a b d")),
        ("pack", lambda x: einops.pack([x, 2 * x], "a * c")[0]),
        ("unpack", lambda x: einops.unpack(x, [(1,), (2,)], "a * c")),
        ("array_api", lambda x: of_array_api.reduce(x, "a b c -> c", "max")),
    ]
    of_two: list[tuple[Any, ...]] = [
        ("contract", lambda x, y: opt_einsum.contract("ij,kj,kl->il", x, x, y), M, S),
        ("contract", lambda x, y: opt_einsum.contract("abc,cd->abd", x, y[:1]), F, F[0, 0:1]),
        ("contract", lambda x: opt_einsum.contract("abc,dbc->ad", x, x), F),
    ]
    return [
        *rows("einops", of_x, F, gives="tensors"),
        *rows("opt_einsum", of_two, gives="tensors"),
    ]


def of_scipy() -> Iterator[Case]:
    def scipy(group: str, call: Callable[..., Any], *arrays: Any, gives: str = "tensors") -> Case:
        room, _, name = group.rpartition(".")

        def called(*args: Any) -> Any:
            module = importlib.import_module(f"scipy.{room}")
            return call(getattr(module, name), *args)

        return Case("scipy", name, called, arrays, gives, room)

    for name in SPECIAL:
        yield scipy(f"special.{name}", lambda fn, x: fn(x / 8), V)
    for name in SPECIAL_OF_TWO:
        yield scipy(f"special.{name}", lambda fn, x: fn(x, x + 1), V)
    for name in ("logsumexp", "softmax", "log_softmax"):
        yield scipy(f"special.{name}", lambda fn, x: fn(x, axis=0), X)
    for name in STATISTICS:
        yield scipy(f"stats.{name}", lambda fn, x: fn(x), V)
    for name in STATISTICS_OF_TWO:
        yield scipy(f"stats.{name}", lambda fn, x, y: fn(x, y), V, W)
    for name in ("ks_2samp", "linregress", "spearmanr"):
        yield scipy(f"stats.{name}", lambda fn, x, y: fn(x, y), V, W, gives="numbers")
    yield scipy("stats.boxcox_llf", lambda fn, x: fn(1.0, x), V)
    yield scipy("stats.ttest_1samp", lambda fn, x: fn(x, 0.0), V)
    yield scipy("stats.trim_mean", lambda fn, x: fn(x, 0.1), V)
    yield scipy("stats.quantile", lambda fn, x: fn(x, 0.3), V)
    for name, call in SIGNAL.items():
        yield scipy(f"signal.{name}", call, V, W)
    for name in SIGNAL_TO_NUMPY:
        yield scipy(f"signal.{name}", lambda fn, x: fn(x), V, gives="numpy's arrays")
    for name in LINEAR:
        yield scipy(
            f"linalg.{name}", lambda fn, x: fn(x), S.astype(np.float64), gives="numpy's arrays"
        )
    yield scipy("linalg.solve", lambda fn, x: fn(x, x[0]), S, gives="numpy's arrays")
    for name in FOURIER:
        yield scipy(f"fft.{name}", lambda fn, x: fn(x), X)
    for name, call in CLUSTER.items():
        yield scipy(f"cluster.{name}", call, X)
    for name in ("trapezoid", "cumulative_trapezoid"):
        yield scipy(f"integrate.{name}", lambda fn, x: fn(x), V)
    yield scipy("ndimage.gaussian_filter", lambda fn, x: fn(x, 1.0), X)
    yield scipy("ndimage.uniform_filter", lambda fn, x: fn(x, 3), X)
    yield scipy("spatial.distance.cdist", lambda fn, x: fn(x, x), X, gives="numpy's arrays")


SPECIAL = (
    *("digamma", "entr", "erf", "erfc", "exp1", "expi", "expit", "gamma", "gammaln", "i0", "i0e"),
    *("i1", "i1e", "j0", "j1", "log_ndtr", "logit", "ndtr", "ndtri"),
)
SPECIAL_OF_TWO = ("betaln", "chdtr", "gammainc", "gammaincc", "rel_entr", "xlogy")
STATISTICS = (
    *("circmean", "circstd", "circvar", "describe", "differential_entropy"),
    *("entropy", "gmean", "gzscore", "hmean", "iqr", "jarque_bera", "kstat", "kstatvar"),
    *("kurtosis", "kurtosistest", "median_abs_deviation", "mode", "moment", "normaltest"),
    *("rankdata", "sem", "skew", "skewtest", "tmax", "tmean", "tmin", "tsem", "tstd", "tvar"),
    *("variation", "zscore", "chisquare", "power_divergence"),
)
STATISTICS_OF_TWO = (
    *("bartlett", "f_oneway", "mannwhitneyu", "pearsonr", "ttest_ind", "ttest_rel"),
)
SIGNAL: dict[str, Callable[..., Any]] = {
    "convolve": lambda fn, x, y: fn(x, y),
    "correlate": lambda fn, x, y: fn(x, y),
    "convolve2d": lambda fn, x, y: fn(x.reshape(4, 8), y.reshape(4, 8)),
    "detrend": lambda fn, x, y: fn(x),
    "fftconvolve": lambda fn, x, y: fn(x, y),
    "filtfilt": lambda fn, x, y: fn(y[:3], abs(x[:3]) + 1, x),
    "hilbert": lambda fn, x, y: fn(x),
    "lfilter": lambda fn, x, y: fn(y[:3], x[:3], x),
    "medfilt": lambda fn, x, y: fn(x, 3),
    "oaconvolve": lambda fn, x, y: fn(x, y),
    "resample": lambda fn, x, y: fn(x, 16),
    "upfirdn": lambda fn, x, y: fn(y[:3], x),
    "wiener": lambda fn, x, y: fn(x, 3),
}
SIGNAL_TO_NUMPY = ("czt", "periodogram")
LINEAR = ("cholesky", "det", "eigh", "expm", "inv", "lu", "norm", "pinv", "qr", "sqrtm", "svdvals")
FOURIER = (
    *("dct", "dctn", "dst", "fft", "fft2", "fftn", "fftshift", "hfft", "idct", "ifft", "rfft"),
)
CLUSTER: dict[str, Callable[..., Any]] = {
    "vq.kmeans2": lambda fn, x: fn(x, x[:3]),
    "vq.vq": lambda fn, x: fn(x, x[:3]),
    "vq.whiten": lambda fn, x: fn(x),
    "hierarchy.linkage": lambda fn, x: fn(x),
}


def of_sklearn() -> Iterator[Case]:
    def sklearn(path: str, call: Callable[..., Any], *arrays: Any, gives: str = "tensors") -> Case:
        room, _, name = path.rpartition(".")

        def called(*args: Any) -> Any:
            return call(getattr(importlib.import_module(f"sklearn.{room}"), name), *args)

        return Case("sklearn", name, called, arrays, gives, room)

    x, y = SAMPLES, LABELS
    yield sklearn(
        "decomposition.PCA", lambda fn, x: abs(fn(3, svd_solver="full").fit(x).transform(x)), x
    )
    yield sklearn(
        "decomposition.PCA",
        lambda fn, x: fn(3, svd_solver="covariance_eigh").fit(x).explained_variance_,
        x,
    )
    yield sklearn(
        "discriminant_analysis.LinearDiscriminantAnalysis",
        lambda fn, x, y: fn().fit(x, y).predict_proba(x),
        *(x, y),
    )
    yield sklearn(
        "linear_model.LogisticRegression", lambda fn, x, y: fn().fit(x, y).predict_proba(x), x, y
    )
    yield sklearn(
        "linear_model.Ridge", lambda fn, x, y: fn(solver="svd").fit(x, y).predict(x), x, TARGETS
    )
    yield sklearn(
        "model_selection.train_test_split", lambda fn, x, y: fn(x, y, random_state=0), x, y
    )
    yield sklearn(
        "neighbors.KNeighborsClassifier",
        lambda fn, x, y: fn(3, algorithm="brute").fit(x, y).predict(x),
        *(x, y),
        gives="numpy's arrays",
    )
    for name in SCALERS:
        square = x @ x.T if name == "KernelCenterer" else x
        yield sklearn(f"preprocessing.{name}", lambda fn, x: fn().fit_transform(x), square)
    for name in ("LabelBinarizer", "LabelEncoder"):
        yield sklearn(f"preprocessing.{name}", lambda fn, y: fn().fit_transform(y), y)
    yield sklearn("naive_bayes.GaussianNB", lambda fn, x, y: fn().fit(x, y).predict_proba(x), x, y)
    yield sklearn(
        "linear_model.LinearRegression", lambda fn, x, y: fn().fit(x, y).coef_, x, TARGETS
    )
    for name in ("RidgeClassifier", "RidgeClassifierCV"):
        yield sklearn(f"linear_model.{name}", lambda fn, x, y: fn().fit(x, y).predict(x), x, y)
    yield sklearn("linear_model.RidgeCV", lambda fn, x, y: fn().fit(x, y).predict(x), x, TARGETS)
    yield sklearn(
        "linear_model.PoissonRegressor",
        lambda fn, x, y: fn().fit(x, y).predict(x),
        *(x, abs(TARGETS) / 9),
    )
    yield sklearn(
        "mixture.GaussianMixture",
        lambda fn, x: fn(2, init_params="random", random_state=0).fit(x).means_,
        x,
    )
    yield sklearn(
        "kernel_approximation.Nystroem",
        lambda fn, x: fn(random_state=0, n_components=5).fit_transform(x),
        x,
    )
    yield sklearn(
        "feature_selection.SelectKBest", lambda fn, x, y: fn(k=2).fit_transform(x, y), x, y
    )
    yield sklearn("model_selection.GridSearchCV", searched, x, TARGETS)
    yield sklearn("pipeline.make_pipeline", piped, x, TARGETS)
    for name in PAIRWISE:
        yield sklearn(f"metrics.pairwise.{name}", lambda fn, x: fn(x, x), abs(x))
    for name in OF_CLASSES:
        yield sklearn(f"metrics.{name}", lambda fn, a, b: fn(a, b), y, GUESSES, gives="numbers")
    for name in ("average_precision_score", "brier_score_loss", "log_loss"):
        chances = 1 / (1 + np.exp(-x[:, 0]))
        yield sklearn(f"metrics.{name}", lambda fn, a, b: fn(a, b), y, chances, gives="numbers")
    for name in ("det_curve", "precision_recall_curve"):
        yield sklearn(f"metrics.{name}", lambda fn, a, b: fn(a, b), y, x[:, 0])
    yield sklearn("metrics.confusion_matrix", lambda fn, a, b: fn(a, b), y, GUESSES)
    for name in OF_VALUES:
        close_by = abs(TARGETS) + 0.1, abs(SAMPLES[:, 1]) + 0.1
        yield sklearn(f"metrics.{name}", lambda fn, a, b: fn(a, b), *close_by, gives="numbers")


def searched(search: Any, x: Any, y: Any) -> Any:
    ridge = importlib.import_module("sklearn.linear_model").Ridge(solver="svd")
    return search(ridge, {"alpha": [0.1, 1.0]}).fit(x, y).predict(x)


def piped(make_pipeline: Any, x: Any, y: Any) -> Any:
    scaler = importlib.import_module("sklearn.preprocessing").StandardScaler()
    pca = importlib.import_module("sklearn.decomposition").PCA(2, svd_solver="full")
    ridge = importlib.import_module("sklearn.linear_model").Ridge(solver="svd")
    return make_pipeline(scaler, pca, ridge).fit(x, y).predict(x)


SCALERS = (
    *("Binarizer", "KernelCenterer", "MaxAbsScaler", "MinMaxScaler", "Normalizer"),
    *("PolynomialFeatures", "StandardScaler"),
)
PAIRWISE = (
    *("chi2_kernel", "cosine_distances", "cosine_similarity", "euclidean_distances"),
    *("linear_kernel", "manhattan_distances", "polynomial_kernel", "rbf_kernel", "sigmoid_kernel"),
)
OF_CLASSES = (
    *(
        "accuracy_score",
        "balanced_accuracy_score",
        "cohen_kappa_score",
        "f1_score",
        "jaccard_score",
    ),
    *("precision_score", "recall_score", "zero_one_loss"),
)
OF_VALUES = (
    *("explained_variance_score", "max_error", "mean_absolute_error", "mean_squared_error"),
    *("median_absolute_error", "r2_score"),
)


def of_files_and_pictures() -> Iterator[Case]:
    """matplotlib, pandas, Pillow and safetensors: what they have of a tensor."""

    def drawn(name: str, call: Callable[..., Any], *arrays: Any) -> Case:
        def called(*args: Any) -> Any:
            importlib.import_module("matplotlib").use("Agg")
            plt = importlib.import_module("matplotlib.pyplot")
            figure, axes = plt.subplots()
            try:
                shown = call(axes, *args)
                figure.savefig(io.BytesIO(), dpi=20)
            finally:
                plt.close(figure)
            return np.asarray(shown, np.float64)

        return Case("matplotlib", name, called, arrays, "a picture")

    yield drawn("plot", lambda axes, x, y: axes.plot(x, y)[0].get_xydata(), V, W)
    yield drawn("plot", lambda axes, x: axes.plot(x)[1].get_ydata(), X)
    yield drawn("hist", lambda axes, x: axes.hist(x, bins=5)[0], V)
    yield drawn("imshow", lambda axes, x: axes.imshow(x).get_array(), X)
    yield drawn("scatter", lambda axes, x, y: axes.scatter(x, y, c=x).get_offsets(), V, W)
    yield drawn("errorbar", lambda axes, x, y: axes.errorbar(x, y, yerr=x)[0].get_ydata(), V, W)
    yield drawn(
        "fill_between", lambda axes, x, y: axes.fill_between(x, y).get_paths()[0].vertices, V, W
    )
    yield drawn("contourf", lambda axes, x: axes.contourf(x).levels, X)

    of_frames: list[tuple[Any, ...]] = [
        ("DataFrame(x)", lambda x: pd.DataFrame(x).to_numpy()),
        ('DataFrame({"a": x})', lambda x: pd.DataFrame({"a": x, "b": V})["a"].to_numpy()),
        ("Series(x)", lambda x: pd.Series(x).to_numpy()),
    ]
    with_frames: list[tuple[Any, ...]] = [
        ("x + series", lambda x: x + pd.Series(V)),
        ("x[series > 1]", lambda x: x[pd.Series(V) > 1]),
        ("ml.asarray(series)", lambda x: ml.asarray(pd.Series(V)) * x),
        ("ml.asarray(frame)", lambda x: ml.asarray(pd.DataFrame(X))[:, 0] * x[0]),
    ]
    yield from rows("pandas", of_frames, V, gives="a frame")
    yield from rows("pandas", with_frames, V, gives="tensors")

    def pixels(x: Any) -> Any:
        return images.fromarray(np.asarray(x))

    to_image = ("Image.fromarray(np.asarray(x))", lambda x: np.asarray(pixels(x)))
    of_image = ("ml.asarray(image)", lambda x: ml.asarray(pixels(x)))
    yield from rows("PIL", [to_image], PIXELS, gives="an image")
    yield from rows("PIL", [of_image], PIXELS, gives="tensors")

    def saved(x: Any) -> Any:
        files = importlib.import_module("safetensors.numpy")
        model = ml.nn.Linear(3, 3)
        with ml.Arena(ml.default_vm(), "loaded").allocating():
            kernel, bias = ml.asarray(x).numpy(), np.ones(3, np.float32)
        data = files.save({"kernel": kernel, "bias": bias})
        model.load_state(files.load(data))
        return model.kernel.numpy()

    yield Case(
        "safetensors", "save({k: v.numpy()})`, `model.load_state(load(...))", saved, (M,), "a file"
    )


def of_frameworks() -> list[Case]:
    """PyTorch and JAX: their tensors in, and ours out."""
    from_torch: list[tuple[Any, ...]] = [
        ("ml.asarray(t)", lambda x: ml.asarray(torch.tensor(M))),
        ("ml.asarray(t.requires_grad_())", lambda x: ml.asarray(torch.tensor(M).requires_grad_())),
        ("ml.asarray(t.bfloat16())", lambda x: ml.asarray((torch.tensor(M) > 0).bfloat16())),
        ("ml.asarray(t.half())", lambda x: ml.asarray((torch.tensor(M) > 0).half())),
        ("x + t", lambda x: ml.asarray(x) + torch.tensor(M)),
        ("t * x", lambda x: torch.tensor(M) * ml.asarray(x)),
        ("x[t]", lambda x: ml.asarray(x)[torch.tensor([2, 0])]),
        ("ml.from_dlpack(t)", lambda x: ml.from_dlpack(torch.tensor(M))),
    ]
    to_torch: list[tuple[Any, ...]] = [
        ("torch.asarray(x)", lambda x: torch.asarray(x)),
        ("torch.as_tensor(x)", lambda x: torch.as_tensor(x)),
        ("torch.from_dlpack(x)", lambda x: torch.from_dlpack(x)),
        ("torch.tensor(x)", lambda x: torch.tensor(x)),
    ]
    from_jax: list[tuple[Any, ...]] = [
        ("ml.asarray(a)", lambda x: ml.asarray(jnp.asarray(M))),
        ("ml.asarray(bfloat16)", lambda x: ml.asarray(jnp.asarray(M > 0, jnp.bfloat16))),
        ("ml.from_dlpack(a)", lambda x: ml.from_dlpack(jnp.asarray(M))),
        ("x + a", lambda x: ml.asarray(x) + jnp.asarray(M)),
        ("a * x", lambda x: jnp.asarray(M) * ml.asarray(x)),
    ]
    return [
        *rows("torch", from_torch, M, gives="tensors"),
        *rows("torch", to_torch, M, gives="theirs"),
        *rows("jax", from_jax, M, gives="tensors"),
        *rows("jax", [("jnp.asarray(x)", lambda x: jnp.asarray(x))], M, gives="theirs"),
    ]


CASES: Final = [
    *of_namespace(),
    *of_einops(),
    *of_scipy(),
    *of_sklearn(),
    *of_files_and_pictures(),
    *of_frameworks(),
]

KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    "tensors": lambda x: isinstance(x, (ml.Tensor, str, type(None))),
    "numpy's arrays": lambda x: isinstance(x, (np.ndarray, np.generic, int, type(None))),
    "numbers": lambda x: isinstance(x, (bool, int, float, np.generic)),
}


def parts(result: Any) -> list[Any]:
    """A result as a list of arrays and numbers: the items of tuples, the fields of an object."""
    if isinstance(result, (tuple, list)):
        return [part for each in result for part in parts(each)]
    if hasattr(result, "statistic") and hasattr(result, "pvalue"):
        return [result.statistic, result.pvalue]
    return [result]


def around(library: str) -> Any:
    if library != "sklearn":
        return nullcontext()
    return importlib.import_module("sklearn").config_context(array_api_dispatch=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_call_gives_what_it_gives_of_numpys_arrays(case: Case) -> None:
    pytest.importorskip(case.library)
    with around(case.library):
        expected = parts(case.call(*[x.copy() for x in case.arrays]))  # `at` writes to its operand
        got = parts(case.call(*[ml.asarray(x) for x in case.arrays]))
    for each, theirs in zip(got, expected, strict=True):
        assert KINDS.get(case.gives, lambda _: True)(each), type(each)
        if each is not None and not isinstance(each, str):
            np.testing.assert_allclose(
                np.asarray(each), np.asarray(theirs), rtol=case.close, atol=case.close
            )


@pytest.mark.parametrize("case", of_einops(), ids=lambda case: case.id)
def test_a_captured_call_gives_the_same_with_its_gradient(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured function reaches the modules themselves, as they are imported."""
    pytest.importorskip(case.library)
    for name, each in [*globals().items()]:
        if isinstance(each, Library) and each.name.startswith(case.library):
            monkeypatch.setitem(globals(), name, importlib.import_module(each.name))
    arrays = [ml.asarray(x) for x in case.arrays]

    def loss(*arrays: ml.Tensor) -> Any:
        return sum(ml.sum(each**2) for each in parts(case.call(*arrays)))

    step = ml.value_and_grad(loss)
    value, gradient = step(*arrays)
    captured = ml.capture(step)
    for _ in range(2):
        again, theirs = captured(*arrays)
        assert again.item() == value.item()
        np.testing.assert_array_equal(theirs.numpy(), gradient.numpy())
    assert captured.signatures == 1


def test_a_captured_reduction_of_ones_own_is_looked_into() -> None:
    einops = pytest.importorskip("einops")
    options = {"scale": 2.0}

    def scaled(x: Any, axes: Any) -> Any:
        return ml.sum(x, axis=tuple(axes)) * options["scale"]

    captured = ml.capture(lambda x: einops.reduce(x, "a b c -> a", scaled))
    x = ml.asarray(F)
    first = captured(x)
    options["scale"] = 3.0
    np.testing.assert_allclose(captured(x).numpy(), first.numpy() * 1.5, rtol=1e-6)


def test_array_api_libraries_are_captured() -> None:
    compat = pytest.importorskip("array_api_compat")
    xpx = pytest.importorskip("array_api_extra")

    def call(x: Any) -> Any:
        return compat.array_namespace(x).sum(xpx.at(xpx.pad(x, 1))[0].set(5.0), axis=0)

    x, captured = ml.asarray(M), ml.capture(call)
    for _ in range(2):
        np.testing.assert_array_equal(captured(x).numpy(), call(x).numpy())


# --- the page ------------------------------------------------------------------------------

TITLES: Final = {
    "array_api_compat": "array-api-compat",
    "array_api_extra": "array-api-extra",
    "einops": "einops",
    "opt_einsum": "opt_einsum",
    "scipy": "SciPy",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "PIL": "Pillow",
    "safetensors": "safetensors",
    "torch": "PyTorch",
    "jax": "JAX",
}


def table() -> str:
    """The cases as a Markdown table: a row for each library, its parts, and what comes back."""
    rows: dict[tuple[str, str, str], dict[str, None]] = {}
    for case in CASES:
        title = TITLES[case.library] + (f" `{case.group}`" if case.group else "")
        rows.setdefault((title, case.gives, case.library), {})[f"`{case.name}`"] = None
    lines = ["| library | calls | give |\n", "| --- | --- | --- |\n"]
    for (title, gives, _), names in rows.items():
        calls = ", ".join(names).replace("|", "\\|")
        lines.append(f"| {title} | {calls} | {gives} |\n")
    return "".join(lines)


def written(page: str) -> str:
    """The page with the table between its two marks, in place of what stood there."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


def test_the_page_has_the_table_of_the_cases() -> None:
    page = PAGE.read_text("utf-8")
    assert written(page) == page, "run python -m tests.test_interoperability"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
