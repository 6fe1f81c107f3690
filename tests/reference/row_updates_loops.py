"""Steps of the table optimizers, weight by weight in double precision."""

import math

import numpy as np


def sgd(weight, rows, gradient, lr):
    moved = weight.astype(float)
    for row, of_row in zip(rows, gradient, strict=True):
        for column, g in enumerate(of_row):
            moved[row, column] -= lr * g
    return moved


def adagrad(weight, total, rows, gradient, lr, eps):
    moved, total = weight.astype(float), total.astype(float)
    for row, of_row in zip(rows, gradient, strict=True):
        for column, g in enumerate(of_row):
            total[row, column] += float(g) ** 2
            moved[row, column] -= lr * g / (math.sqrt(total[row, column]) + eps)
    return moved, total


def rowwise_adagrad(weight, total, rows, gradient, lr, eps):
    moved, total = weight.astype(float), total.astype(float)
    for row, of_row in zip(rows, gradient, strict=True):
        total[row] += sum(float(g) ** 2 for g in of_row) / len(of_row)
        for column, g in enumerate(of_row):
            moved[row, column] -= lr * g / (math.sqrt(total[row]) + eps)
    return moved, total


def adam(weight, first, second, rows, gradient, lr, betas, eps, step):
    moved, first, second = (np.array(values, dtype=float) for values in (weight, first, second))
    for row, of_row in zip(rows, gradient, strict=True):
        for column, g in enumerate(of_row):
            at = row, column
            first[at] = betas[0] * first[at] + (1 - betas[0]) * g
            second[at] = betas[1] * second[at] + (1 - betas[1]) * float(g) ** 2
            corrected = first[at] / (1 - betas[0] ** step), second[at] / (1 - betas[1] ** step)
            moved[at] -= lr * corrected[0] / (math.sqrt(corrected[1]) + eps)
    return moved, first, second
