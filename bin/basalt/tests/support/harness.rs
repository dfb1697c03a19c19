//! A runner of cases for programs of tests that are something else, too, and so have no harness of the compiler's. Knows no case.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// A case's name, and what it does; one that panics has failed.
pub(crate) type Case = (&'static str, fn());

/// Runs those that the program's arguments ask for, as the standard harness has these, and says how they ended.
pub(crate) fn run(cases: impl IntoIterator<Item = Case>, arguments: &[String]) -> ExitCode {
    let exact = arguments.iter().any(|argument| argument == "--exact");
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let is_asked_for = |name: &str| match exact {
        true => filters.iter().any(|filter| name == *filter),
        false => filters.iter().any(|filter| name.contains(filter.as_str())),
    };
    let (mut passed, mut failed, mut filtered) = (0, 0, 0);
    for (name, case) in cases {
        if !filters.is_empty() && !is_asked_for(name) {
            filtered += 1;
            continue;
        }
        let word = match catch_unwind(AssertUnwindSafe(case)) {
            Ok(()) => {
                passed += 1;
                "ok"
            }
            Err(_) => {
                failed += 1;
                "FAILED"
            }
        };
        say(&format!("test {name} ... {word}"));
    }
    let word = if failed == 0 { "ok" } else { "FAILED" };
    // As the standard harness says it, so that whoever adds up tests need not know this one.
    say(&format!(
        "\ntest result: {word}. {passed} passed; {failed} failed; 0 ignored; 0 measured; {filtered} filtered out"
    ));
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A line on standard output.
pub(crate) fn say(line: &str) {
    writeln!(std::io::stdout(), "{line}").expect("standard output");
}
