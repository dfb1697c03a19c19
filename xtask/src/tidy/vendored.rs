//! Files that others wrote and that stay as they are (`[vendored]` in layers.toml): each has the sum that is listed there.
//!
//! The rules about lines do not hold for them. Knows no file's content.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::{Finding, Source};

/// Whether the rules about lines are not for this file, which has its sum checked instead.
pub(super) fn check(listed: &BTreeMap<String, String>, source: &Source, findings: &mut Vec<Finding>) -> bool {
    let Some(expected) = listed.get(&source.path) else {
        return false;
    };
    let sum = hex::encode(Sha256::digest(&source.text));
    if sum != *expected {
        let message = format!(
            "has the sum {sum}, not the one that layers.toml lists; take the change back, or update the list and the README \
             that says where the file comes from"
        );
        findings.push(Finding::new(&source.path, 0, message));
    }
    true
}

/// What is listed is there.
pub(super) fn are_there(listed: &BTreeMap<String, String>, sources: &[Source], findings: &mut Vec<Finding>) {
    for path in listed.keys() {
        if !sources.iter().any(|source| source.path == *path) {
            let message = "is listed under [vendored] and does not exist; remove the line";
            findings.push(Finding::new(path, 0, message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    #[test]
    fn a_file_of_others_stays_as_it_is_and_is_there() {
        let sum = hex::encode(Sha256::digest("theirs \n"));
        let listed = BTreeMap::from([("a.xml".to_owned(), sum)]);
        let mut findings = Vec::new();
        assert!(check(&listed, &source("a.xml", "theirs \n"), &mut findings) && findings.is_empty());
        assert!(!check(&listed, &source("b.xml", "ours\n"), &mut findings));
        check(&listed, &source("a.xml", "ours\n"), &mut findings);
        assert!(findings[0].message.contains("has the sum"));
        are_there(&listed, &[source("b.xml", "")], &mut findings);
        assert!(findings[1].message.contains("does not exist"));
    }
}
