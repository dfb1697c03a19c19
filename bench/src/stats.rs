//! What is made of raw samples: medians and verdicts. Knows nothing of what was measured.

use serde::{Deserialize, Serialize};

/// The middle value, or the mean of the two in the middle; nothing of nothing.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted.get(middle).copied()
    } else {
        Some(f64::midpoint(
            *sorted.get(middle.checked_sub(1)?)?,
            *sorted.get(middle)?,
        ))
    }
}

/// The slope of the straight line that comes closest to these points, and how much of their differences it explains (R²).
pub(crate) fn straight(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    #[allow(clippy::cast_precision_loss, reason = "a handful of points")]
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x_mean, y_mean) = (mean(|point| point.0), mean(|point| point.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|&(x, y)| of(x - x_mean, y - y_mean)).sum::<f64>();
    let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
    (points.len() > 2 && xx > 0.0 && yy > 0.0).then(|| (xy / xx, xy * xy / (xx * yy)))
}

/// The slope alone, of two points or more that are not one above the other: of a flat line, too.
pub(crate) fn slope(points: &[(f64, f64)]) -> Option<f64> {
    #[allow(clippy::cast_precision_loss, reason = "a handful of points")]
    let count = points.len() as f64;
    let x_mean = points.iter().map(|point| point.0).sum::<f64>() / count;
    let y_mean = points.iter().map(|point| point.1).sum::<f64>() / count;
    let xx: f64 = points.iter().map(|(x, _)| (x - x_mean).powi(2)).sum();
    let xy: f64 = points.iter().map(|(x, y)| (x - x_mean) * (y - y_mean)).sum();
    (xx > 0.0).then(|| xy / xx)
}

/// What a figure is held against.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Target {
    AtMost(f64),
    AtLeast(f64),
    Under(f64),
}

impl Target {
    pub(crate) fn reached(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
            Self::Under(limit) => value < limit,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (word, limit) = match self {
            Self::AtMost(limit) => ("at most", limit),
            Self::AtLeast(limit) => ("at least", limit),
            Self::Under(limit) => ("under", limit),
        };
        // 2.5 MB are 2.384185791015625 MiB.
        write!(f, "{word} {}", (limit * 1000.0).round() / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 100.0]), Some(3.0));
    }

    #[test]
    fn straight_lines() {
        assert_eq!(straight(&[(0.0, 1.0), (1.0, 3.0)]), None);
        let (slope, fit) = straight(&[(0.0, 1.0), (1.0, 3.0), (4.0, 9.0)]).unwrap();
        assert!((slope - 2.0).abs() < 1e-9 && (fit - 1.0).abs() < 1e-9);
        let (slope, fit) = straight(&[(0.0, 0.0), (1.0, 1.0), (2.0, 0.0)]).unwrap();
        assert!(slope.abs() < 1e-9 && fit < 0.1);
    }

    #[test]
    fn slopes() {
        assert_eq!(slope(&[]), None);
        assert_eq!(slope(&[(1.0, 5.0)]), None);
        assert_eq!(slope(&[(1.0, 5.0), (1.0, 9.0)]), None);
        assert_eq!(slope(&[(1.0, 5.0), (2.0, 5.0), (4.0, 5.0)]), Some(0.0));
        assert_eq!(slope(&[(0.5, 100.0), (4.5, 2900.0)]), Some(700.0));
        // Of 0, 1 and 2 with 1, 0 and 5: (-1 * -1 + 0 * -2 + 1 * 3) / 2.
        let least_squares = slope(&[(0.0, 1.0), (1.0, 0.0), (2.0, 5.0)]).unwrap();
        assert!((least_squares - 2.0).abs() < 1e-9, "{least_squares}");
    }

    #[test]
    fn limits_are_held_at_their_edge() {
        assert!(Target::AtMost(0.15).reached(0.15));
        assert!(!Target::AtMost(0.15).reached(0.151));
        assert!(Target::AtLeast(0.95).reached(0.95));
        assert!(!Target::AtLeast(0.95).reached(0.949));
        assert!(!Target::Under(3.0).reached(3.0));
        assert!(Target::Under(3.0).reached(2.99));
    }
}
