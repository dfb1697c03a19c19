//! What a VMM's start is made of: the marks that it sets itself, against the moment of its exec that the kernel saw.
//! Knows no VMM's marks by name.

use std::collections::BTreeMap;

use vmm_api::Mark;
use vmm_api::message::FIRST_RUN;

use crate::report::Figure;
use crate::trace::milliseconds;

/// Samples of each step, by who was started.
#[derive(Default)]
pub(crate) struct Steps(BTreeMap<&'static str, Vec<(String, Vec<f64>)>>);

impl Steps {
    /// Adds a start that took `total` milliseconds from exec to the last mark.
    pub(crate) fn put(&mut self, who: &'static str, total: f64, marks: &[Mark]) {
        let Some(last) = marks.iter().position(|mark| mark.name == FIRST_RUN) else {
            return;
        };
        let marks = marks.get(..=last).unwrap_or_default();
        let between = |from: &Mark, to: &Mark| milliseconds(to.at_ns.saturating_sub(from.at_ns));
        let (Some(first), Some(last)) = (marks.first(), marks.last()) else {
            return;
        };
        self.add(who, &format!("exec to {}", first.name), total - between(first, last));
        for (from, to) in marks.iter().zip(marks.iter().skip(1)) {
            self.add(who, &format!("to {}", to.name), between(from, to));
        }
    }

    fn add(&mut self, who: &'static str, step: &str, value: f64) {
        let steps = self.0.entry(who).or_default();
        match steps.iter_mut().find(|(name, _)| name == step) {
            Some((_, samples)) => samples.push(value),
            None => steps.push((step.to_owned(), vec![value])),
        }
    }

    /// The figure of one of them, in the order of the steps.
    pub(crate) fn take(&mut self, who: &str) -> Option<Figure> {
        let steps = self.0.remove(who)?;
        let mut figure = Figure::new(&format!("Steps of that start, by the VMM's own marks: {who}"), "ms");
        for (name, samples) in steps {
            figure.add(&name, samples);
        }
        Some(figure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_add_up_to_the_whole() {
        let marks = [
            ("main", 1_000_000),
            ("made", 3_000_000),
            (FIRST_RUN, 7_000_000),
            ("later", 9_000_000),
        ];
        let marks = marks.map(|(name, at_ns)| Mark {
            name: name.to_owned(),
            at_ns,
        });
        let mut steps = Steps::default();
        steps.put("x", 8.0, &marks);
        let figure = steps.take("x").unwrap();
        let values: Vec<(&str, f64)> = figure
            .series
            .iter()
            .map(|series| (series.who.as_str(), series.median))
            .collect();
        assert_eq!(
            values,
            [("exec to main", 2.0), ("to made", 2.0), ("to first KVM_RUN", 4.0)]
        );
        assert!(steps.take("x").is_none());
        steps.put("y", 1.0, &marks[..2]);
        assert!(steps.take("y").is_none(), "one that was never started");
    }
}
