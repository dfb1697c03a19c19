//! What tenants ask the gateway to do when it builds a template. Knows no build: nothing is done.

use gateway::check_build;

use crate::run::{Target, outcome};

/// The longest title of a step, in letters: it is cut, and three dots follow.
const TITLE: usize = 303;

/// The body of a request that has a build begin.
pub(crate) fn plans() -> Target {
    let hash = "0123456789abcdef".repeat(4);
    let copy = format!(
        r#"{{"fromTemplate":"base:v1","steps":[{{"type":"copy","args":["a/./b/../c/*.txt","/srv/","web:www","0644"],"filesHash":"{hash}"}},
            {{"type":"COPY","args":["..","/x"],"filesHash":"{hash}"}}]}}"#
    );
    Target {
        name: "gateway-build-plan",
        seeds: vec![
            br#"{"fromImage":"python:3","steps":[{"type":"RUN","args":["pip install x","root"]},{"type":"ENV","args":["A","b=c"]}],
                "startCmd":"serve","readyCmd":"curl -f 127.0.0.1"}"#
                .to_vec(),
            copy.into_bytes(),
            br#"{"fromImage":"a","steps":[{"type":"WORKDIR","args":["/srv"]},{"type":"USER","args":["1000:1000"]}]}"#.to_vec(),
            br#"{"fromImage":"a","fromTemplate":"b"}"#.to_vec(),
            br#"{"fromImageRegistry":{"type":"aws"},"fromImage":"a"}"#.to_vec(),
        ],
        parse: |bytes| match check_build(bytes) {
            Err(error) => outcome(error.to_string()),
            Ok(titles) => {
                for title in &titles {
                    assert!(title.chars().count() <= TITLE, "a title of {} bytes", title.len());
                }
                let kinds = titles.iter().filter_map(|title| title.split(' ').next());
                outcome(format!("good {}", kinds.collect::<Vec<_>>().join(" ")))
            }
        },
    }
}
