//! UUIDs, as clients want them for what has another id here. Asks nobody.

/// 32 digits with the dashes of a UUID; zeroes stand for those that are missing.
pub(crate) fn dashed(digits: &str) -> String {
    let digits: String = digits.chars().chain(std::iter::repeat('0')).take(32).collect();
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default();
    [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
}

/// A new one (RFC 9562, version 4).
///
/// # Errors
/// The host gives no random bytes.
pub(crate) fn random() -> Result<String, control::Error> {
    let digits = control::random_hex::<16>()?;
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default();
    Ok(dashed(&format!("{}4{}8{}", part(0, 12), part(13, 16), part(17, 32))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one() {
        assert_eq!(
            dashed(&"0123456789abcdef".repeat(4)),
            "01234567-89ab-cdef-0123-456789abcdef"
        );
        assert_eq!(dashed("ab"), "ab000000-0000-0000-0000-000000000000");
    }

    #[test]
    fn a_new_one_says_its_version_and_variant() {
        let id = random().unwrap();
        let lengths: Vec<usize> = id.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert_eq!((&id[14..15], &id[19..20]), ("4", "8"));
        assert_ne!(random().unwrap(), id);
    }
}
