//! Text that may hold secrets, as logs, spans and outputs may show it: of an environment variable its name, and not its
//! value. Does not know where variables come from.

use std::fmt;

/// What stands in a value's place.
pub const REDACTED: &str = "<redacted>";

/// `NAME=<redacted>` for `NAME=value`. Of what has no name nothing is shown.
pub fn variable(entry: &[u8]) -> String {
    match entry.iter().position(|&byte| byte == b'=') {
        Some(at) => format!(
            "{}={REDACTED}",
            String::from_utf8_lossy(entry.get(..at).unwrap_or_default())
        ),
        None => REDACTED.to_owned(),
    }
}

/// Variables whose `Debug` shows their names.
pub struct Variables<'v, T>(pub &'v [T]);

impl<T: AsRef<[u8]>> fmt::Debug for Variables<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|entry| variable(entry.as_ref())))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_and_values_are_not() {
        assert_eq!(variable(b"A=secret"), "A=<redacted>");
        assert_eq!(variable(b"A=b=secret"), "A=<redacted>");
        assert_eq!(variable(b"A="), "A=<redacted>");
        assert_eq!(variable(b"secret"), "<redacted>");
        let shown = format!("{:?}", Variables(&["A=secret", "B=secret"]));
        assert_eq!(shown, r#"["A=<redacted>", "B=<redacted>"]"#);
    }
}
