//! What tenants call their templates and tags. Asks nobody.

use control::DEFAULT_TAG;

use crate::Error;
use crate::origin::split;

/// The most tags of one request.
const MAX_TAGS: usize = 20;

/// Checks a template's name.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    node_api::check_template_name(name).map_err(|_| {
        Error::invalid(format!(
            "`{name}` cannot be a template's name: begin with a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most, and not \
             12 hexadecimal digits or more alone"
        ))
    })
}

/// Checks tags.
pub(crate) fn check_tags(tags: &[String]) -> Result<(), Error> {
    if tags.len() > MAX_TAGS {
        return Err(Error::invalid(format!(
            "there are {} tags: give {MAX_TAGS} at most",
            tags.len()
        )));
    }
    match tags.iter().find(|tag| node_api::check_name(tag).is_err()) {
        Some(tag) => Err(Error::invalid(format!(
            "`{tag}` cannot be a tag: begin with a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most"
        ))),
        None => Ok(()),
    }
}

/// The name and the tags of what somebody calls `name:tag`, with more tags; the usual one where there is none.
pub(crate) fn wanted(text: &str, more: &[String]) -> Result<(String, Vec<String>), Error> {
    let (name, _) = split(text);
    check_name(name)?;
    let mut tags: Vec<String> = Vec::new();
    let own = text.split_once(':').map(|(_, tag)| tag.to_owned());
    for tag in own.iter().chain(more) {
        if !tags.contains(tag) {
            tags.push(tag.clone());
        }
    }
    if tags.is_empty() {
        tags.push(DEFAULT_TAG.to_owned());
    }
    check_tags(&tags)?;
    Ok((name.to_owned(), tags))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, more: &[&str]) -> Option<(String, Vec<String>)> {
        let more: Vec<String> = more.iter().map(|&tag| tag.to_owned()).collect();
        wanted(text, &more).ok()
    }

    #[test]
    fn a_name_has_the_tags_that_are_written_and_else_the_usual_one() {
        let is = |text, more: &[&str], tags: &[&str]| {
            let (name, found) = of(text, more).unwrap();
            assert_eq!(name, "web");
            assert_eq!(found, tags, "{text}");
        };
        is("web", &[], &["default"]);
        is("web:v1", &[], &["v1"]);
        is("web", &["v1", "v1", "b"], &["v1", "b"]);
        is("web:v1", &["b", "v1"], &["v1", "b"]);
    }

    #[test]
    fn what_cannot_be_a_name_or_a_tag_is_refused() {
        let long = "a".repeat(65);
        for text in [
            "",
            ":v1",
            "web:",
            "a/b",
            "../x",
            "web:v1:x",
            "0123456789ab",
            "ü",
            "web:a b",
            &long,
        ] {
            assert_eq!(of(text, &[]), None, "{text}");
        }
        assert_eq!(of("web", &["a/b"]), None);
        let many: Vec<String> = (0..21).map(|number| number.to_string()).collect();
        assert!(wanted("web", &many).is_err());
    }
}
