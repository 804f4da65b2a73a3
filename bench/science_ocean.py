"""Two kernels of an ocean model on a grid, written for any array library.

isoneutral_mixing: the tensor of diffusion along surfaces of equal density, from the slopes of the
    four triads around each face (Griffies et al., Isoneutral Diffusion in a z-Coordinate Ocean
    Model, 1998).
turbulent_kinetic_energy: one step of turbulent kinetic energy, with implicit vertical diffusion and
    dissipation, lateral diffusion, and advection with the superbee limiter (Gaspar et al., 1990).

Fields have the axes east, north and up. Operands are random numbers in [0, 1), which the programs
shift to a useful range.
"""

from __future__ import annotations

from typing import Any

from bench.science_programs import Tools

SMALL = 1e-20


def _face(axis: int, first: int, last: int) -> tuple[slice, ...]:
    """Return the points first .. n + last along an axis, and the inner points of other level axes.

    The vertical axis, 2, is whole unless it is the given one.
    """
    inner = [slice(2, -2), slice(2, -2), slice(None)]
    inner[axis] = slice(first, last or None)
    return tuple(inner)


def isoneutral_mixing(
    t: Tools, turns: int, salt: Any, heat: Any, mixing: Any, mask: Any, dz: Any
) -> Any:
    dz = dz + 0.5
    mask = t.xp.where(mask > 0.1, 0.0 * mask + 1.0, 0.0 * mask)
    by_heat = mask * (-0.2 - 0.01 * heat + 0.003 * salt)  # derivatives of the density
    by_salt = mask * (0.8 - 0.003 * heat)
    up, below = slice(1, None), slice(None, -1)

    def gradients(axis: int, width: Any) -> tuple[Any, Any]:
        """Return the differences of heat and salt toward the next cell, at the face between."""
        at = [slice(None)] * 3
        at[axis] = below
        here = tuple(at)
        at[axis] = up
        there = tuple(at)
        scale = mask[here] * mask[there] / width
        return (
            t.put(0.0 * mask, here, scale * (heat[there] - heat[here])),
            t.put(0.0 * mask, here, scale * (salt[there] - salt[here])),
        )

    heat_up, salt_up = gradients(2, dz[:-1])

    def tapered(slope: Any) -> Any:
        return 0.5 * (1.0 + t.xp.tanh(1.0 - t.xp.abs(slope)))

    results = []
    vertical = 0.0 * mask
    for axis in (0, 1):
        along_heat, along_salt = gradients(axis, 1.3)
        face = _face(axis, 1, -2)
        open_face = mask[face]
        spread = 0.5 * (mixing[face] + mixing[_face(axis, 2, -1)])
        spread = t.put(1.0 * spread, (..., up), 0.5 * (spread[..., up] + spread[..., below]))
        total = 0.0 * spread
        for step in (0, 1):  # the upper and the lower half of the cell
            levels, faces = (up, below) if step == 0 else (slice(None), slice(None))
            thickness = dz[faces]
            for side in (0, 1):  # the cell on either side of the face
                cell = _face(axis, 1 + side, -2 + side)
                heat_factor, salt_factor = by_heat[cell][..., levels], by_salt[cell][..., levels]
                flat = heat_factor * along_heat[face][..., levels]
                flat = flat + salt_factor * along_salt[face][..., levels]
                steep = heat_factor * heat_up[cell][..., faces]
                steep = steep + salt_factor * salt_up[cell][..., faces]
                slope = -flat / (t.xp.where(steep < 0.0, steep, 0.0) - SMALL)
                taper = tapered(slope)
                share = spread[..., levels] * taper
                share = thickness * open_face[..., levels] * t.xp.where(share > 0.1, share, 0.1)
                total = t.put(total, (..., levels), total[..., levels] + share)
                steepness = spread[..., levels] * taper * slope * slope
                at = (*cell[:2], levels)
                vertical = t.put(vertical, at, vertical[at] + 0.25 * thickness * steepness)
                results.append(taper * slope * open_face[..., levels])
        results.append(total / (4.0 * dz))
    return [*results, vertical / dz]


def turbulent_kinetic_energy(
    t: Tools,
    turns: int,
    energy: Any,
    before: Any,
    u: Any,
    v: Any,
    w: Any,
    mixing: Any,
    length: Any,
    forcing: Any,
    mask: Any,
    dz: Any,
) -> Any:
    dz, length = dz + 0.5, length + 0.2
    mask = t.xp.where(mask > 0.1, 0.0 * mask + 1.0, 0.0 * mask)
    u, v, w = u - 0.5, v - 0.5, w - 0.5
    dt, eps, levels = 0.1, 0.1, dz.shape[0]
    inner = (slice(2, -2), slice(2, -2))

    # vertical diffusion and dissipation, implicit: a tridiagonal system in each column
    loss = dt * 0.7 * t.xp.sqrt(energy[inner]) / length[inner]
    delta = 0.0 * loss
    flux = dt * 0.5 * (mixing[inner][..., :-1] + mixing[inner][..., 1:]) / dz[1:]
    delta = t.put(delta, (..., slice(None, -1)), flux)
    lower = t.put(0.0 * loss, (..., slice(1, None)), -delta[..., :-1] / dz[1:])
    upper = -delta / dz
    diagonal = 1.0 + loss - lower - upper
    right = energy[inner] + dt * (forcing[inner] - 0.5)

    def eliminate(k: Any, upper: Any, right: Any) -> Any:
        k = k + 1
        scale = 1.0 / (diagonal[:, :, k] - lower[:, :, k] * upper[:, :, k - 1])
        value = (right[:, :, k] - lower[:, :, k] * right[:, :, k - 1]) * scale
        at = (slice(None), slice(None), k)
        return t.put(upper, at, upper[:, :, k] * scale), t.put(right, at, value)

    def substitute(j: Any, right: Any) -> Any:
        k = levels - 2 - j
        value = right[:, :, k] - upper[:, :, k] * right[:, :, k + 1]
        return (t.put(right, (slice(None), slice(None), k), value),)

    first = (slice(None), slice(None), 0)
    right = t.put(right, first, right[:, :, 0] / diagonal[:, :, 0])
    upper = t.put(upper, first, upper[:, :, 0] / diagonal[:, :, 0])
    upper, right = t.loop(levels - 1, eliminate, (upper, right))
    (right,) = t.loop(levels - 1, substitute, (right,))
    new = t.put(1.0 * energy, inner, t.xp.where(right > 0.0, right, 0.0))

    # lateral diffusion, explicit
    east = 20.0 * (energy[1:] - energy[:-1]) * mask[:-1] * mask[1:]
    north = 20.0 * (energy[:, 1:] - energy[:, :-1]) * mask[:, :-1] * mask[:, 1:]
    spread = east[2:-1, 2:-2] - east[1:-2, 2:-2] + north[2:-2, 2:-1] - north[2:-2, 1:-2]
    new = t.put(new, inner, new[inner] + 1e-3 * dt * mask[inner] * spread)

    # advection with the superbee limiter
    def advected(speed: Any, axis: int) -> Any:
        """Return the fluxes through the faces 1 .. n - 3 along an axis."""

        def at(shift: int) -> tuple[slice, ...]:
            n = energy.shape[axis]
            index = [slice(None)] * 3
            index[axis] = slice(1 + shift, n - 2 + shift)
            return tuple(index)

        behind, here, ahead, beyond = (at(shift) for shift in (-1, 0, 1, 2))
        speed = speed[here]
        slope = (energy[ahead] - energy[here]) * mask[here]
        before = (energy[here] - energy[behind]) * mask[behind]
        after = (energy[beyond] - energy[ahead]) * mask[ahead]
        divisor = t.xp.where(t.xp.abs(slope) < SMALL, SMALL, slope)
        ratio = t.xp.where(speed > 0.0, before, after) / divisor
        gentle = t.xp.where(2.0 * ratio < 1.0, 2.0 * ratio, 1.0)
        sharp = t.xp.where(ratio < 2.0, ratio, 2.0)
        limit = t.xp.where(gentle > sharp, gentle, sharp)
        limit = t.xp.where(limit > 0.0, limit, 0.0)
        courant = t.xp.abs(speed) * dt
        mean = 0.5 * speed * (energy[ahead] + energy[here])
        return mean - 0.5 * t.xp.abs(speed) * (1.0 - limit + courant * limit) * slope

    east, north, top = advected(u, 0), advected(v, 1), advected(w, 2)
    change = east[:-1, 2:-2] - east[1:, 2:-2] + north[2:-2, :-1] - north[2:-2, 1:]
    rise = top[2:-2, 2:-2, :-1] - top[2:-2, 2:-2, 1:]
    middle = (..., slice(2, -2))
    change = t.put(change, middle, change[middle] + rise / dz[2:-2])
    change = change * mask[inner]
    step = dt * ((1.5 + eps) * change - (0.5 + eps) * before[inner])
    return [t.put(new, inner, new[inner] + step), change]
