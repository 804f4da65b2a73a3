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


def of_namespace() -> Iterator[Case]:
    """array-api-compat and array-api-extra: what they say of a tensor, and what they compute."""

    def compat() -> Any:
        return importlib.import_module("array_api_compat")

    def of_compat(name: str, call: Callable[..., Any]) -> Case:
        return Case("array_api_compat", name, call, (F,), "numbers")

    yield of_compat(
        "array_namespace",
        lambda x: (
            compat().array_namespace(x).__name__.partition(".")[0] in ("mlvm", "array_api_compat")
        ),
    )
    yield of_compat("is_array_api_obj", lambda x: compat().is_array_api_obj(x))
    yield of_compat("size", lambda x: compat().size(x))
    yield Case(
        "array_api_compat", "to_device", lambda x: compat().to_device(x, compat().device(x)), (F,)
    )

    def extra(name: str, call: Callable[..., Any], *arrays: Any) -> Case:
        def called(*args: Any) -> Any:
            return call(importlib.import_module("array_api_extra"), *args)

        return Case("array_api_extra", name, called, arrays or (M[0],))

    def of_size(name: str) -> Case:
        return extra(name, lambda xpx, x: getattr(xpx, name)(3, xp=compat().array_namespace(x)))

    yield extra("angle", lambda xpx, x: xpx.angle(x * (1 + 1j)))
    yield extra(
        "apply_where", lambda xpx, x: xpx.apply_where(x > 0, x, lambda a: a * 2, lambda a: a)
    )
    yield extra("argpartition", lambda xpx, x: xpx.argpartition(x, 1)[1:2])
    yield extra("at", lambda xpx, x: xpx.at(x)[x > 0].set(5.0))
    yield extra("at", lambda xpx, x: xpx.at(x)[0].add(5.0))
    yield extra("at", lambda xpx, x: xpx.at(x, 1).multiply(5.0))
    yield extra("atleast_nd", lambda xpx, x: xpx.atleast_nd(x, ndim=3))
    yield extra("cov", lambda xpx, x: xpx.cov(x), M)
    yield extra("create_diagonal", lambda xpx, x: xpx.create_diagonal(x, offset=1))
    yield extra("deg2rad", lambda xpx, x: xpx.deg2rad(x))
    yield extra("isclose", lambda xpx, x: xpx.isclose(x, x + 1e-9))
    yield extra("isin", lambda xpx, x: xpx.isin(x, x[:1]))
    yield extra("kron", lambda xpx, x: xpx.kron(x, x), M)
    yield extra(
        "lazy_apply",
        lambda xpx, x: xpx.lazy_apply(np.sin, x, shape=x.shape, dtype=x.dtype, as_numpy=True),
    )
    yield extra("nan_to_num", lambda xpx, x: xpx.nan_to_num(x / x), np.array([0, 1, 2], np.float32))
    yield extra("nanmax", lambda xpx, x: xpx.nanmax(x / x), np.array([0, 1, 2], np.float32))
    yield extra("nanmean", lambda xpx, x: xpx.nanmean(x / x), np.array([0, 1, 2], np.float32))
    yield extra("nunique", lambda xpx, x: xpx.nunique(x), np.array([3, 1, 3]))
    yield extra("one_hot", lambda xpx, x: xpx.one_hot(x, 4), np.array([3, 1, 3]))
    yield extra("pad", lambda xpx, x: xpx.pad(x, 2, constant_values=1.0))
    yield extra("partition", lambda xpx, x: xpx.partition(x, 1)[1:2])
    yield extra(
        "searchsorted", lambda xpx, x: xpx.searchsorted(x, x), np.array([1, 2, 3], np.float32)
    )
    yield extra(
        "setdiff1d", lambda xpx, x: xpx.setdiff1d(x, x[:1]), np.array([1, 2, 3], np.float32)
    )
    yield extra("sinc", lambda xpx, x: xpx.sinc(x))
    yield extra("nanmin", lambda xpx, x: xpx.nanmin(x / x), np.array([0, 1, 2], np.float32))
    yield extra("nansum", lambda xpx, x: xpx.nansum(x / x), np.array([0, 1, 2], np.float32))
    yield extra("rad2deg", lambda xpx, x: xpx.rad2deg(x))
    for name in ("diag_indices", "tril_indices", "triu_indices"):
        yield of_size(name)
    yield extra("unravel_index", lambda xpx, x: xpx.unravel_index(x, (2, 4)), np.array([3, 5]))
    yield extra("union1d", lambda xpx, x, y: xpx.union1d(x, y), M[0], M[1])


def of_einops() -> Iterator[Case]:
    def einops(name: str, *rest: Any, **lengths: Any) -> Case:
        def called(x: Any) -> Any:
            return getattr(importlib.import_module("einops"), name)(x, *rest, **lengths)

        return Case("einops", name, called, (F,))

    yield einops("rearrange", "a b c -> c (a b)")
    yield einops("rearrange", "a (b d) c -> d a b c", d=3)
    for reduction in ("mean", "sum", "max", "min", "prod"):
        yield einops("reduce", "a b (c d) -> b d", reduction, d=2)
    yield einops("repeat", "a b c -> a (d b) c e", d=2, e=3)
    modules = {
        "einsum": lambda x: importlib.import_module("einops").einsum(x, x, "a b c, a d c -> a b d"),
        "pack": lambda x: importlib.import_module("einops").pack([x, 2 * x], "a * c")[0],
        "unpack": lambda x: importlib.import_module("einops").unpack(x, [(1,), (2,)], "a * c"),
        "array_api": lambda x: importlib.import_module("einops.array_api").reduce(
            x, "a b c -> c", "max"
        ),
    }
    for name, call in modules.items():
        yield Case("einops", name, call, (F,))

    def contract(*operands: Any) -> Any:
        return importlib.import_module("opt_einsum").contract(*operands)

    yield Case("opt_einsum", "contract", lambda x, y: contract("ij,kj,kl->il", x, x, y), (M, S))
    yield Case(
        "opt_einsum", "contract", lambda x, y: contract("abc,cd->abd", x, y[:1]), (F, F[0, 0:1])
    )


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

    def frame(name: str, call: Callable[..., Any], gives: str = "a frame") -> Case:
        return Case(
            "pandas", name, lambda *x: call(importlib.import_module("pandas"), *x), (V,), gives
        )

    yield frame("DataFrame(x)", lambda pd, x: pd.DataFrame(x).to_numpy())
    yield frame('DataFrame({"a": x})', lambda pd, x: pd.DataFrame({"a": x, "b": V})["a"].to_numpy())
    yield frame("Series(x)", lambda pd, x: pd.Series(x).to_numpy())
    yield frame("x + series", lambda pd, x: x + pd.Series(V), "tensors")
    yield frame("x[series > 1]", lambda pd, x: x[pd.Series(V) > 1], "tensors")
    yield frame("ml.asarray(series)", lambda pd, x: ml.asarray(pd.Series(V)) * x, "tensors")
    yield frame(
        "ml.asarray(frame)", lambda pd, x: ml.asarray(pd.DataFrame(X))[:, 0] * x[0], "tensors"
    )

    def image(name: str, call: Callable[..., Any], gives: str) -> Case:
        pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)

        def called(x: Any) -> Any:
            return call(importlib.import_module("PIL.Image"), x)

        return Case("PIL", name, called, (pixels,), gives)

    yield image(
        "Image.fromarray(np.asarray(x))",
        lambda images, x: np.asarray(images.fromarray(np.asarray(x))),
        "an image",
    )
    yield image(
        "ml.asarray(image)",
        lambda images, x: ml.asarray(images.fromarray(np.asarray(x))),
        "tensors",
    )

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


def of_frameworks() -> Iterator[Case]:
    """PyTorch and JAX: their tensors in, and ours out."""

    def torch(name: str, call: Callable[..., Any], gives: str = "tensors") -> Case:
        return Case("torch", name, lambda x: call(importlib.import_module("torch"), x), (M,), gives)

    yield torch("ml.asarray(t)", lambda torch, x: ml.asarray(torch.tensor(M)))
    yield torch(
        "ml.asarray(t.requires_grad_())",
        lambda torch, x: ml.asarray(torch.tensor(M).requires_grad_()),
    )
    yield torch(
        "ml.asarray(t.bfloat16())",
        lambda torch, x: ml.asarray((torch.tensor(M) > 0).to(torch.bfloat16)),
    )
    yield torch("ml.asarray(t.half())", lambda torch, x: ml.asarray((torch.tensor(M) > 0).half()))
    yield torch("x + t", lambda torch, x: ml.asarray(x) + torch.tensor(M))
    yield torch("t * x", lambda torch, x: torch.tensor(M) * ml.asarray(x))
    yield torch("x[t]", lambda torch, x: ml.asarray(x)[torch.tensor([2, 0])])
    yield torch("ml.from_dlpack(t)", lambda torch, x: ml.from_dlpack(torch.tensor(M)))
    yield torch("torch.asarray(x)", lambda torch, x: torch.asarray(x), "theirs")
    yield torch("torch.as_tensor(x)", lambda torch, x: torch.as_tensor(x), "theirs")
    yield torch("torch.from_dlpack(x)", lambda torch, x: torch.from_dlpack(x), "theirs")
    yield torch("torch.tensor(x)", lambda torch, x: torch.tensor(x), "theirs")

    def jax(name: str, call: Callable[..., Any], gives: str = "tensors") -> Case:
        return Case(
            "jax", name, lambda x: call(importlib.import_module("jax.numpy"), x), (M,), gives
        )

    yield jax("ml.asarray(a)", lambda jnp, x: ml.asarray(jnp.asarray(M)))
    yield jax("ml.asarray(bfloat16)", lambda jnp, x: ml.asarray(jnp.asarray(M > 0, jnp.bfloat16)))
    yield jax("ml.from_dlpack(a)", lambda jnp, x: ml.from_dlpack(jnp.asarray(M)))
    yield jax("x + a", lambda jnp, x: ml.asarray(x) + jnp.asarray(M))
    yield jax("a * x", lambda jnp, x: jnp.asarray(M) * ml.asarray(x))
    yield jax("jnp.asarray(x)", lambda jnp, x: jnp.asarray(x), "theirs")


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


CAPTURED: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "rearrange": lambda einops, x: einops.rearrange(x, "a (b d) c -> d a b c", d=3),
    "reduce": lambda einops, x: einops.reduce(x, "a b (c d) -> b d", "mean", d=2),
    "repeat": lambda einops, x: einops.repeat(x, "a b c -> a (d b) c e", d=2, e=3),
    "einsum": lambda einops, x: einops.einsum(x, x, "a b c, a d c -> a b d"),
    "pack": lambda einops, x: einops.pack([x, 2 * x], "a * c")[0],
    "array_api": lambda einops, x: einops.array_api.reduce(x, "a b c -> c", "max"),
    "contract": lambda opt_einsum, x: opt_einsum.contract("abc,dbc->ad", x, x),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_call_gives_the_same_with_its_gradient(name: str) -> None:
    library = pytest.importorskip("opt_einsum" if name == "contract" else "einops")
    if name == "array_api":
        pytest.importorskip("einops.array_api")
    call, x = CAPTURED[name], ml.asarray(F)
    step = ml.value_and_grad(lambda x: ml.sum(call(library, x) ** 2))
    value, gradient = step(x)
    captured = ml.capture(step)
    for _ in range(2):
        again, theirs = captured(x)
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
