//! What a client has told: a value for each thing that can be compared, read from what it printed.
//!
//! Knows how each client's output looks, and neither drivers nor servers. What differs between two runs of the same driver
//! anyway, such as times, is left out here.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value};

/// By name, such as a test's or a property's.
pub(super) type Results = BTreeMap<String, String>;

/// Adds a value; a name that is there already gets a number.
fn add(results: &mut Results, name: &str, value: &str) {
    let mut free = name.to_owned();
    let mut number = 1;
    while results.contains_key(&free) {
        number += 1;
        free = format!("{name} #{number}");
    }
    results.insert(free, value.to_owned());
}

/// `clinfo --raw`: `[SUFFIX/DEVICE] NAME VALUE`, of a platform without the brackets. The suffix is a value among the others.
pub(super) fn clinfo(lines: &[String]) -> Results {
    let mut results = Results::new();
    for line in lines {
        let (of, rest) = match line.trim().strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((of, rest)) => (of.rsplit('/').next().unwrap_or(of), rest),
            None => ("platform", line.as_str()),
        };
        let rest = rest.trim();
        if !rest.is_empty() {
            let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            add(&mut results, &format!("{of} {name}"), value.trim());
        }
    }
    results
}

/// `clpeak`: `NAME : NUMBER` below a heading. Numbers are what it measured, so only whether there is one is a result.
pub(super) fn clpeak(lines: &[String]) -> Results {
    let mut results = Results::new();
    let mut heading = String::new();
    for line in lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty()) {
        match line.split_once(':') {
            Some((name, value)) => {
                let value = value.trim();
                let is_number = number(value).is_some_and(|number| number > 0.0);
                let value = if is_number { "a number" } else { value };
                add(&mut results, &format!("{heading}: {}", name.trim()), value);
            }
            None => line.clone_into(&mut heading),
        }
    }
    results
}

/// The number at the start of a text.
pub(super) fn number(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}

/// What `basalt_results.py` wrote. A test that has begun and not ended is one in which the process did.
pub(super) fn pytest(text: &str) -> Results {
    let mut results = Results::new();
    for line in text.lines() {
        let Some((outcome, test)) = line.split_once(' ') else {
            continue;
        };
        let outcome = if outcome == "begun" {
            "the process ended"
        } else {
            outcome
        };
        // A test's last word counts: what fails when it is cleaned up has passed before.
        results.insert(without_device(test), outcome.to_owned());
    }
    results
}

/// A test's name without the device, which PyOpenCL's plugin puts there.
fn without_device(test: &str) -> String {
    let Some((before, rest)) = test.split_once("<context factory for ") else {
        return test.to_owned();
    };
    match rest.split_once(">>") {
        Some((_, after)) => format!("{before}context{after}"),
        None => test.to_owned(),
    }
}

/// `piglit`: lines of `PIGLIT: ` and an object, which has the program's result or those of parts of it.
pub(super) fn piglit(program: &str, lines: &[String]) -> Result<Results> {
    let mut results = Results::new();
    for line in lines {
        let Some(text) = line.strip_prefix("PIGLIT:") else {
            continue;
        };
        let told: Map<String, Value> =
            serde_json::from_str(text).with_context(|| format!("{program} says what is no JSON: {text}"))?;
        for (what, value) in told {
            match (what.as_str(), value) {
                ("result", Value::String(outcome)) => add(&mut results, program, &outcome),
                ("subtest", Value::Object(parts)) => {
                    for (part, outcome) in parts {
                        let outcome = outcome.as_str().unwrap_or_default();
                        add(&mut results, &format!("{program}: {part}"), outcome);
                    }
                }
                (what, value) => bail!("{program} says {what}: {value}, which is no result"),
            }
        }
    }
    Ok(results)
}

/// `hashcat`: the lines of its status that do not depend on time, and what it found.
pub(super) fn hashcat(lines: &[String], hash: &str) -> Results {
    let mut results = Results::new();
    for line in lines {
        if let Some(at) = line.find(&format!("{hash}:")) {
            results.insert("found".into(), line[at..].trim().to_owned());
        }
        let Some((name, value)) = line.split_once(": ") else {
            continue;
        };
        let name = name.trim_end_matches('.');
        if ["Status", "Hash.Mode", "Hash.Target", "Guess.Mask", "Recovered"].contains(&name) {
            results.insert(name.to_owned(), value.to_owned());
        }
    }
    results
}

/// CLBlast's tests: the sums that it prints for each routine and precision.
pub(super) fn clblast(lines: &[String]) -> Results {
    let mut results = Results::new();
    let mut routine = String::new();
    for line in lines.iter().map(|line| plain(line)) {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix("* Starting tests for the '") {
            rest.split('\'').next().unwrap_or_default().clone_into(&mut routine);
        } else if let Some((count, what)) = line.split_once(" test(s) ") {
            add(&mut results, &format!("{routine} {what}"), count);
        } else if line.starts_with("* All tests skipped") {
            add(&mut results, &routine, line.trim_start_matches("* "));
        }
    }
    results
}

/// A line without the sequences that colour it (ECMA-48, SGR).
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        text.push_str(before);
        rest = after.split_once('m').map_or("", |(_, after)| after);
    }
    text + rest
}

/// `clFFT-client`: whether what it transformed is what its length says.
pub(super) fn clfft(name: &str, lines: &[String]) -> Results {
    let said = lines.iter().find(|line| line.contains("Internal Client Test"));
    let said = said.map_or("said nothing of its test", |line| line.trim());
    Results::from([(name.to_owned(), said.to_owned())])
}

/// How many there are of each value if these are few, and how many in all if not.
pub(super) fn sum(results: &Results) -> String {
    let mut counts = BTreeMap::<&str, usize>::new();
    results
        .values()
        .for_each(|value| *counts.entry(value).or_default() += 1);
    if counts.len() > 7 || counts.keys().any(|value| value.len() > 20) {
        return format!("{} values", results.len());
    }
    let counts: Vec<_> = counts.iter().map(|(value, count)| format!("{count} {value}")).collect();
    counts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn properties_are_of_a_platform_or_of_a_device() {
        let text =
            "  CL_PLATFORM_NAME     A platform\n\n[X/0]   CL_DEVICE_NAME   A device\n[X/0]   CL_DEVICE_NAME   \n";
        let results = clinfo(&lines(text));
        assert_eq!(results["platform CL_PLATFORM_NAME"], "A platform");
        assert_eq!(results["0 CL_DEVICE_NAME"], "A device");
        assert_eq!(results["0 CL_DEVICE_NAME #2"], "");
    }

    #[test]
    fn measured_numbers_are_told_apart_from_words_and_from_nothing() {
        let text = "  Transfer bandwidth (GBPS)\n   enqueueWriteBuffer : 4.2\n  enqueueReadBuffer : Skipped\n   memcpy : 0.0\n";
        let results = clpeak(&lines(text));
        assert_eq!(results["Transfer bandwidth (GBPS): enqueueWriteBuffer"], "a number");
        assert_eq!(results["Transfer bandwidth (GBPS): enqueueReadBuffer"], "Skipped");
        assert_eq!(results["Transfer bandwidth (GBPS): memcpy"], "0.0");
    }

    #[test]
    fn a_test_that_did_not_end_is_told() {
        let of = "[<context factory for <pyopencl.Device 'a' on 'b'>>-4]";
        let text = format!("begun t.py::one{of}\npassed t.py::one{of}\nbegun t.py::two\n");
        let results = pytest(&text);
        assert_eq!(results["t.py::one[context-4]"], "passed");
        assert_eq!(results["t.py::two"], "the process ended");
        assert_eq!(sum(&results), "1 passed, 1 the process ended");
    }

    #[test]
    fn a_failure_while_cleaning_up_counts() {
        assert_eq!(pytest("begun t\npassed t\nfailed t\n")["t"], "failed");
    }

    #[test]
    fn piglits_programs_have_results_and_parts() {
        let text = "noise\nPIGLIT: {\"subtest\": {\"Input checks\" : \"fail\"}}\nPIGLIT: {\"result\": \"pass\" }\n";
        let results = piglit("p", &lines(text)).unwrap();
        assert_eq!((&*results["p"], &*results["p: Input checks"]), ("pass", "fail"));
        assert!(piglit("p", &lines("PIGLIT: {")).is_err());
        assert!(piglit("p", &lines("PIGLIT: {\"pid\": 7}")).is_err());
    }

    #[test]
    fn what_hashcat_found_is_on_a_line_that_it_draws_over() {
        let text = "[s]tatus =>      00ff:abz\nStatus...........: Cracked\nTime.Started.....: now\n";
        let results = hashcat(&lines(text), "00ff");
        let wanted = [("Status", "Cracked"), ("found", "00ff:abz")];
        assert!(
            results
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .eq(wanted)
        );
    }

    #[test]
    fn sums_of_clblast_are_by_routine() {
        let text = "* Starting tests for the \u{1b}[1m'SAXPY'\u{1b}[0m routine. Legend:\n   36 test(s) passed\n   \
                    \u{1b}[35m0 test(s) skipped\u{1b}[0m\n* Starting tests for the 'HAXPY' routine.\n\
                    * All tests skipped: \u{1b}[35mUnsupported precision\u{1b}[0m\n";
        let results = clblast(&lines(text));
        assert_eq!(results["SAXPY passed"], "36");
        assert_eq!(results["SAXPY skipped"], "0");
        assert_eq!(results["HAXPY"], "All tests skipped: Unsupported precision");
    }
}
