//! What is to be done in a build, as somebody has asked for it: checked, and with everything bounded. Asks nobody.

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::files::check_hash;
use crate::Error;

/// The most steps.
const MAX_STEPS: usize = 1000;

/// The longest argument of a step. A program's argument has 128 KiB at most.
const MAX_ARGUMENT: usize = 64 << 10;

/// The most variables, of a template and so of a step.
pub(super) const MAX_VARIABLES: usize = 256;

/// What is to be done.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateBuildStartV2)]
pub(crate) struct StartBuild {
    /// An image that the node has.
    from_image: Option<String>,
    /// A template of the tenant's, or of the node's.
    from_template: Option<String>,
    /// Not served: the node's operator pulls images.
    from_image_registry: Option<Value>,
    /// Nothing is taken from earlier builds, so that it is of no effect.
    #[expect(dead_code, reason = "it is part of the document")]
    force: Option<bool>,
    /// What is done, one after the other.
    steps: Option<Vec<AskedStep>>,
    /// What runs on in sandboxes.
    start_cmd: Option<String>,
    /// Run until it ends with 0.
    ready_cmd: Option<String>,
}

/// A step, as it was asked for.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateStep)]
pub(crate) struct AskedStep {
    /// `COPY`, `ENV`, `RUN`, `USER` or `WORKDIR`.
    r#type: String,
    /// What it is about.
    args: Option<Vec<String>>,
    /// Of `COPY`: which upload.
    files_hash: Option<String>,
}

/// What it is built on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// An image of the node's.
    Image(String),
    /// A template.
    Template(String),
}

/// A step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Run a command, maybe as another user.
    Run { command: String, user: Option<String> },
    /// Bring files.
    Copy(CopyStep),
    /// Set variables.
    Env(Vec<(String, String)>),
    /// Work in this directory, which is made.
    Workdir(String),
    /// Be this user.
    User(String),
}

/// Files to bring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyStep {
    /// What of the archive; empty is all of it.
    pub(crate) from: String,
    /// Where to.
    pub(crate) to: String,
    /// Whose they become: `name|uid[:group|gid]`.
    pub(crate) owner: Option<String>,
    /// Their mode, in octal digits.
    pub(crate) mode: Option<String>,
    /// Which upload.
    pub(crate) hash: String,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) base: Base,
    pub(crate) steps: Vec<Step>,
    pub(crate) start: Option<String>,
    pub(crate) ready: Option<String>,
}

impl Plan {
    /// Checks what was asked for.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub(crate) fn of(asked: StartBuild) -> Result<Self, Error> {
        if asked.from_image_registry.is_some_and(|registry| !registry.is_null()) {
            return Err(Error::invalid(
                "`fromImageRegistry` is not served: this node fetches no images for tenants. Its operator pulls the image with \
                 `basalt pull`, which knows credentials, and you build on it without them",
            ));
        }
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let base = match (given(asked.from_image), given(asked.from_template)) {
            (Some(image), None) => Base::Image(image),
            (None, Some(template)) => Base::Template(template),
            (None, None) => return Err(Error::invalid("neither `fromImage` nor `fromTemplate` is given")),
            (Some(_), Some(_)) => {
                return Err(Error::invalid(
                    "`fromImage` and `fromTemplate` are both given: give one",
                ));
            }
        };
        let (Base::Image(text) | Base::Template(text)) = &base;
        if text.len() > 512 || text.chars().any(char::is_control) {
            return Err(Error::invalid("what it is to be built on has no name that can be"));
        }
        let steps = asked.steps.unwrap_or_default();
        if steps.len() > MAX_STEPS {
            return Err(Error::invalid(format!(
                "there are {} steps: give {MAX_STEPS} at most, such as by putting commands together with `&&`",
                steps.len()
            )));
        }
        let steps = steps.into_iter().enumerate();
        let steps =
            steps.map(|(at, step)| Step::of(step).map_err(|why| Error::invalid(format!("step {}: {why}", at + 1))));
        let plan = Self {
            base,
            steps: steps.collect::<Result<_, _>>()?,
            start: given(asked.start_cmd),
            ready: given(asked.ready_cmd),
        };
        for script in plan.start.iter().chain(&plan.ready) {
            check_text(script).map_err(Error::invalid)?;
        }
        Ok(plan)
    }

    /// The uploads that it needs.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = &str> {
        self.steps.iter().filter_map(|step| match step {
            Step::Copy(copy) => Some(copy.hash.as_str()),
            _ => None,
        })
    }
}

fn check_text(text: &str) -> Result<(), String> {
    match text {
        text if text.contains('\0') => Err("no argument can hold a zero byte".to_owned()),
        text if text.len() > MAX_ARGUMENT => Err(format!(
            "an argument has {} bytes, and may have {MAX_ARGUMENT}: bring what is large as a file",
            text.len()
        )),
        _ => Ok(()),
    }
}

impl Step {
    fn of(asked: AskedStep) -> Result<Self, String> {
        let args = asked.args.unwrap_or_default();
        args.iter().try_for_each(|text| check_text(text))?;
        let kind = asked.r#type.to_ascii_uppercase();
        let mut args = args.into_iter();
        let mut next = |what: &str| {
            let given = args.next().filter(|text| !text.is_empty());
            given.ok_or_else(|| format!("{kind} needs {what}"))
        };
        match kind.as_str() {
            "RUN" => {
                let command = next("a command")?;
                let user = args.next().filter(|user| !user.is_empty());
                user.as_deref().map_or(Ok(()), check_user)?;
                Ok(Self::Run { command, user })
            }
            "COPY" => {
                let (from, to) = (next("what is to be copied")?, next("where to")?);
                let mut given = || args.next().filter(|text| !text.is_empty());
                let (owner, mode) = (given(), given());
                owner.as_deref().map_or(Ok(()), check_user)?;
                mode.as_deref().map_or(Ok(()), check_mode)?;
                let hash = asked.files_hash.unwrap_or_default();
                check_hash(&hash).map_err(|error| error.to_string())?;
                Ok(Self::Copy(CopyStep {
                    from: source(&from)?,
                    to,
                    owner,
                    mode,
                    hash,
                }))
            }
            "ENV" => {
                let all: Vec<String> = args.collect();
                let (pairs, rest) = all.as_chunks::<2>();
                if pairs.is_empty() || !rest.is_empty() {
                    return Err("ENV needs names, each with a value".to_owned());
                }
                if pairs.len() > MAX_VARIABLES {
                    return Err(format!(
                        "ENV has {} variables, and a template may have {MAX_VARIABLES}",
                        pairs.len()
                    ));
                }
                let pairs = pairs
                    .iter()
                    .map(|[name, value]| match name.is_empty() || name.contains('=') {
                        true => Err(format!("{name:?} cannot be the name of an environment variable")),
                        false => Ok((name.clone(), value.clone())),
                    });
                Ok(Self::Env(pairs.collect::<Result<_, _>>()?))
            }
            "WORKDIR" => Ok(Self::Workdir(next("a directory")?)),
            "USER" => {
                let user = next("a user's name")?;
                check_user(&user)?;
                Ok(Self::User(user))
            }
            other => Err(format!(
                "`{}` is no step: there are COPY, ENV, RUN, USER and WORKDIR",
                other.chars().take(32).collect::<String>()
            )),
        }
    }

    /// As its log and its failure have it.
    pub(crate) fn title(&self) -> String {
        const MOST: usize = 300;
        let text = match self {
            Self::Run { command, user: None } => format!("RUN {command}"),
            Self::Run {
                command,
                user: Some(user),
            } => format!("RUN (as {user}) {command}"),
            Self::Copy(copy) if copy.from.is_empty() => format!("COPY . {}", copy.to),
            Self::Copy(copy) => format!("COPY {} {}", copy.from, copy.to),
            // Values may be secrets.
            Self::Env(pairs) => {
                let names: Vec<&str> = pairs.iter().map(|(name, _)| name.as_str()).collect();
                format!("ENV {}", names.join(" "))
            }
            Self::Workdir(directory) => format!("WORKDIR {directory}"),
            Self::User(user) => format!("USER {user}"),
        };
        match text.char_indices().nth(MOST) {
            Some((at, _)) => format!("{}...", text.get(..at).unwrap_or_default()),
            None => text,
        }
    }
}

/// `name|uid[:group|gid]`, which no shell and no program takes for something else.
fn check_user(user: &str) -> Result<(), String> {
    let is_word = |word: &str| {
        let first = word
            .bytes()
            .next()
            .is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        first
            && word.len() <= 32
            && word
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"_.-$".contains(&byte))
    };
    let good = match user.split_once(':') {
        Some((name, group)) => is_word(name) && is_word(group),
        None => is_word(user),
    };
    match good {
        true => Ok(()),
        false => Err(format!(
            "`{user}` cannot be a user: write a name or a number, and a group after a colon"
        )),
    }
}

fn check_mode(mode: &str) -> Result<(), String> {
    match (1..=5).contains(&mode.len()) && mode.bytes().all(|byte| (b'0'..=b'7').contains(&byte)) {
        true => Ok(()),
        false => Err(format!("`{mode}` is no mode: write octal digits")),
    }
}

/// What of the archive is meant: what stands before the first pattern, which its sender has resolved.
fn source(text: &str) -> Result<String, String> {
    let is_pattern = |part: &str| part.contains(['*', '?', '[', '{']);
    let mut plain = PathBuf::new();
    for part in Path::new(text).components() {
        match part {
            Component::Normal(part) if part.to_str().is_some_and(is_pattern) => break,
            Component::Normal(part) => plain.push(part),
            Component::CurDir => (),
            Component::ParentDir if plain.pop() => (),
            _ => return Err(format!("`{text}` leads out of what is copied from")),
        }
    }
    Ok(plain.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plan(asked: Value) -> Result<Plan, Error> {
        Plan::of(serde_json::from_value(asked).unwrap())
    }

    fn step(kind: &str, args: &[&str], hash: Option<&str>) -> Result<Step, String> {
        Step::of(AskedStep {
            r#type: kind.into(),
            args: Some(args.iter().map(|&arg| arg.to_owned()).collect()),
            files_hash: hash.map(str::to_owned),
        })
    }

    const HASH: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn what_the_sdks_send_is_understood() {
        let asked = json!({
            "fromImage": "python:3", "force": false, "startCmd": "serve", "readyCmd": "true",
            "steps": [
                {"type": "COPY", "args": ["./app/*.py", "/app/", "user:users", "0755"], "force": false, "filesHash": HASH, "forceUpload": true},
                {"type": "RUN", "args": ["pip install x"], "force": null},
                {"type": "RUN", "args": ["id", "root"], "force": true},
                {"type": "ENV", "args": ["A", "b", "C", ""], "force": false},
                {"type": "WORKDIR", "args": ["/app"], "force": false},
                {"type": "USER", "args": ["user"], "force": false},
            ],
        });
        let plan = plan(asked).unwrap();
        assert_eq!(plan.base, Base::Image("python:3".into()));
        assert_eq!(
            (plan.start.as_deref(), plan.ready.as_deref()),
            (Some("serve"), Some("true"))
        );
        assert_eq!(plan.hashes().collect::<Vec<_>>(), [HASH]);
        assert_eq!(
            plan.steps[0],
            Step::Copy(CopyStep {
                from: "app".into(),
                to: "/app/".into(),
                owner: Some("user:users".into()),
                mode: Some("0755".into()),
                hash: HASH.into()
            })
        );
        let titles: Vec<String> = plan.steps.iter().map(Step::title).collect();
        assert_eq!(
            titles,
            [
                "COPY app /app/",
                "RUN pip install x",
                "RUN (as root) id",
                "ENV A C",
                "WORKDIR /app",
                "USER user"
            ]
        );
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let refusal = |asked: Value| plan(asked).unwrap_err().to_string();
        assert!(refusal(json!({})).contains("neither"));
        assert!(refusal(json!({"fromImage": "a", "fromTemplate": "b"})).contains("both"));
        let registry =
            json!({"fromImage": "a", "fromImageRegistry": {"type": "registry", "username": "u", "password": "p"}});
        assert!(refusal(registry).contains("basalt pull"));
        let many: Vec<Value> = vec![json!({"type": "RUN", "args": ["true"]}); 10_000];
        assert!(refusal(json!({"fromImage": "a", "steps": many})).contains("10000 steps"));
        let second =
            json!({"fromImage": "a", "steps": [{"type": "RUN", "args": ["true"]}, {"type": "ADD", "args": ["x"]}]});
        assert!(refusal(second).contains("step 2: `ADD`"));
        assert!(refusal(json!({"fromImage": "a\nb"})).contains("no name"));
        assert!(plan(json!({"fromImage": "a", "fromTemplate": null, "steps": null})).is_ok());
    }

    #[test]
    fn steps_are_bounded_and_lead_nowhere() {
        for (kind, args, hash) in [
            ("RUN", &[][..], None),
            ("RUN", &[""], None),
            ("RUN", &["a\0b"], None),
            ("RUN", &["id", "-x"], None),
            ("RUN", &["id", "a b"], None),
            ("USER", &["a:b:c"], None),
            ("WORKDIR", &[""], None),
            ("ENV", &["A"], None),
            ("ENV", &["A=B", "c"], None),
            ("ENV", &[], None),
            ("COPY", &["a"], Some(HASH)),
            ("COPY", &["a", "b"], None),
            ("COPY", &["a", "b"], Some("../../etc/passwd")),
            ("COPY", &["../a", "b"], Some(HASH)),
            ("COPY", &["/a", "b"], Some(HASH)),
            ("COPY", &["a/../..", "b"], Some(HASH)),
            ("COPY", &["a", "b", "", "999"], Some(HASH)),
            ("COPY", &["a", "b", "$(id)"], Some(HASH)),
        ] {
            assert!(step(kind, args, hash).is_err(), "{kind} {args:?}");
        }
        assert!(step("RUN", &[&"x".repeat(MAX_ARGUMENT + 1)], None).is_err());
        let many = vec!["A"; 2 * (MAX_VARIABLES + 1)];
        assert!(step("ENV", &many, None).unwrap_err().contains("257 variables"));
        assert!(step("ENV", &many[2..], None).is_ok());
        for (text, plain) in [
            (".", ""),
            ("*", ""),
            ("a/b/", "a/b"),
            ("a/../b", "b"),
            ("a/**/x", "a"),
            ("..a", "..a"),
        ] {
            assert_eq!(source(text).as_deref(), Ok(plain), "{text}");
        }
    }
}
