//! The step `deny`: licences, sources and versions of all dependencies, as cargo knows them, against `deny.toml`.
//!
//! The file is cargo-deny's, so that it can be used beside this: what is checked here is what it asks for, and a key that
//! this does not know is an error. The tool itself took minutes to build, to run for a second. Reads no licence's text:
//! a crate that names no licence is refused, whatever its files say.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::build::cargo;
use super::deb::captured;
use crate::context::Context;
use crate::runner::{Report, Step};

/// What is checked.
const FILE: &str = "deny.toml";

/// Licences, sources and wildcards of dependencies.
pub(crate) fn deny() -> Step {
    Step::new("deny", |context, task| {
        let text = fs::read_to_string(context.root.join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
        let rules = Rules::parse(&text)?;
        let mut findings = BTreeSet::new();
        let mut twice = BTreeSet::new();
        let mut crates = 0;
        for target in &rules.graph.targets {
            let graph = metadata(context, target, rules.graph.all_features)?;
            let packages = packages(&graph)?;
            crates = crates.max(packages.len());
            findings.extend(packages.iter().flat_map(|package| rules.judge(package)));
            twice.extend(with_more_versions(&packages));
        }
        for finding in &findings {
            task.say(finding)?;
        }
        for name in &twice {
            task.say(&format!("warning: more than one version of {name}"))?;
        }
        if !findings.is_empty() {
            bail!("{} of {crates} crates break {FILE}", findings.len());
        }
        Ok(Report {
            detail: format!("{crates} crates, {} of them in more than one version", twice.len()),
            ..Report::default()
        })
    })
    .after(&["apt-packages"])
    .check()
    .hint("deny.toml says what is allowed and why")
}

fn metadata(context: &Context, target: &str, all_features: bool) -> Result<Value> {
    let mut command = std::process::Command::new(cargo(context, &[]).get_program());
    command.args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        target,
    ]);
    if all_features {
        command.arg("--all-features");
    }
    let said = captured(command.current_dir(&context.root))?;
    serde_json::from_slice(&said).context("cargo metadata")
}

/// `deny.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    graph: Graph,
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Graph {
    targets: Vec<String>,
    all_features: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Bans {
    multiple_versions: Level,
    wildcards: Level,
    allow_wildcard_paths: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sources {
    unknown_registry: Level,
    unknown_git: Level,
    allow_registry: Vec<String>,
    allow_git: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Level {
    Warn,
    Deny,
}

/// A crate of the graph, as `cargo metadata` has it.
#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    id: String,
    /// An expression of SPDX.
    license: Option<String>,
    /// None for crates of this checkout.
    source: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    req: String,
    path: Option<String>,
    /// None for what the crate itself needs, otherwise `build` or `dev`.
    kind: Option<String>,
}

/// All crates of the graph for one target; `packages` has those of other targets, too.
fn packages(metadata: &Value) -> Result<Vec<Package>> {
    let nodes = metadata["resolve"]["nodes"].as_array();
    let nodes = nodes.context("cargo metadata has no graph")?;
    let used: BTreeSet<_> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let mut all: Vec<Package> = Vec::deserialize(&metadata["packages"]).context("cargo metadata")?;
    all.retain(|package| used.contains(package.id.as_str()));
    Ok(all)
}

fn with_more_versions(packages: &[Package]) -> BTreeSet<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().insert(&package.version);
    }
    let more = versions.into_iter().filter(|(_, versions)| versions.len() > 1);
    more.map(|(name, _)| name.to_owned()).collect()
}

impl Rules {
    fn parse(text: &str) -> Result<Self> {
        let rules: Self =
            toml::from_str(text).with_context(|| format!("{FILE}: the step `deny` knows no such rule"))?;
        let levels = [
            rules.bans.wildcards,
            rules.sources.unknown_registry,
            rules.sources.unknown_git,
        ];
        if levels.contains(&Level::Warn)
            || rules.bans.multiple_versions != Level::Warn
            || !rules.bans.allow_wildcard_paths
        {
            bail!(
                "{FILE}: the step `deny` refuses wildcards and unknown sources, and warns of second versions; nothing else is made"
            );
        }
        Ok(rules)
    }

    /// What is wrong with a crate.
    fn judge(&self, package: &Package) -> Vec<String> {
        let mut wrong = Vec::new();
        match &package.license {
            None => wrong.push("names no licence".to_owned()),
            Some(license) => match expression(license, &self.licenses.allow) {
                Ok(true) => {}
                Ok(false) => wrong.push(format!("has the licence {license}, which is not allowed")),
                Err(error) => wrong.push(format!("has the licence {license}: {error}")),
            },
        }
        if let Some(source) = &package.source
            && !self.is_known(source)
        {
            wrong.push(format!("comes from {source}, which is not allowed"));
        }
        let is_ours = package.source.is_none();
        // Others' tests are neither built nor run here.
        let matters = |dependency: &&Dependency| is_ours || dependency.kind.as_deref() != Some("dev");
        for dependency in package.dependencies.iter().filter(matters) {
            if dependency.req == "*" && !(is_ours && dependency.path.is_some()) {
                wrong.push(format!("takes any version of {}", dependency.name));
            }
        }
        let name = format!("{} {}", package.name, package.version);
        wrong.into_iter().map(|what| format!("{name} {what}")).collect()
    }

    fn is_known(&self, source: &str) -> bool {
        match source.split_once('+') {
            Some(("registry" | "sparse", url)) => self.sources.allow_registry.iter().any(|known| known == url),
            Some(("git", url)) => self.sources.allow_git.iter().any(|known| url.starts_with(known)),
            _ => false,
        }
    }
}

/// Whether an SPDX licence expression can be met with these licences (SPDX specification, annex "SPDX license expressions";
/// the slash is cargo's old way to write OR).
fn expression(text: &str, allowed: &[String]) -> Result<bool> {
    let spaced = text.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().collect::<Vec<_>>().into_iter().peekable();
    let met = any(&mut words, allowed)?;
    match words.next() {
        None => Ok(met),
        Some(word) => bail!("{word} is out of place"),
    }
}

type Words<'a> = std::iter::Peekable<std::vec::IntoIter<&'a str>>;

fn any(words: &mut Words<'_>, allowed: &[String]) -> Result<bool> {
    let mut met = all(words, allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        met |= all(words, allowed)?;
    }
    Ok(met)
}

fn all(words: &mut Words<'_>, allowed: &[String]) -> Result<bool> {
    let mut met = one(words, allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed)?;
    }
    Ok(met)
}

fn one(words: &mut Words<'_>, allowed: &[String]) -> Result<bool> {
    match words.next() {
        Some("(") => {
            let met = any(words, allowed)?;
            match words.next() {
                Some(")") => Ok(met),
                _ => bail!("a parenthesis is not closed"),
            }
        }
        Some(word) if ![")", "AND", "OR", "WITH"].contains(&word) => {
            let mut name = word.to_owned();
            if words.next_if_eq(&"WITH").is_some() {
                let exception = words.next().context("WITH without an exception")?;
                name = format!("{name} WITH {exception}");
            }
            Ok(allowed.contains(&name))
        }
        _ => bail!("a licence is missing"),
    }
}

#[cfg(test)]
mod self_tests {
    use super::*;

    const TEXT: &str = include_str!("../../../deny.toml");

    fn package(change: impl Fn(&mut Package)) -> Package {
        let mut package = Package {
            name: "a".to_owned(),
            version: "1.0.0".to_owned(),
            id: "a".to_owned(),
            license: Some("MIT".to_owned()),
            source: Some(format!(
                "registry+{}",
                Rules::parse(TEXT).unwrap().sources.allow_registry[0]
            )),
            dependencies: Vec::new(),
        };
        change(&mut package);
        package
    }

    fn any_version(path: Option<&str>, kind: Option<&str>) -> Dependency {
        Dependency {
            name: "b".to_owned(),
            req: "*".to_owned(),
            path: path.map(str::to_owned),
            kind: kind.map(str::to_owned),
        }
    }

    #[test]
    fn expressions_are_met_or_not() {
        let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        for good in [
            "MIT",
            "GPL-2.0 OR MIT",
            "Unlicense/MIT",
            "MIT AND Apache-2.0",
            "(GPL-2.0 OR MIT) AND Apache-2.0",
            "Apache-2.0 WITH LLVM-exception AND MIT",
            "GPL-2.0 AND ISC OR MIT",
        ] {
            assert!(expression(good, &allowed).unwrap(), "{good}");
        }
        for bad in [
            "GPL-2.0",
            "MIT AND GPL-2.0",
            "MIT WITH LLVM-exception",
            "(MIT OR ISC) AND GPL-2.0",
            "GPL-2.0 AND (MIT OR ISC)",
        ] {
            assert!(!expression(bad, &allowed).unwrap(), "{bad}");
        }
        for broken in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "AND MIT", "MIT WITH"] {
            assert!(expression(broken, &allowed).is_err(), "{broken}");
        }
    }

    #[test]
    fn each_rule_is_kept() {
        let rules = Rules::parse(TEXT).unwrap();
        let good = [
            package(|_| ()),
            package(|package| package.dependencies.push(any_version(None, Some("dev")))),
            package(|package| {
                package.source = None;
                package.dependencies.push(any_version(Some("/x"), None));
            }),
        ];
        assert_eq!(good.iter().flat_map(|package| rules.judge(package)).count(), 0);
        for (bad, word) in [
            (package(|package| package.license = None), "names no licence"),
            (
                package(|package| package.license = Some("GPL-3.0".into())),
                "GPL-3.0, which is not allowed",
            ),
            (
                package(|package| package.license = Some("MIT OR".into())),
                "a licence is missing",
            ),
            (
                package(|package| package.source = Some("registry+elsewhere".into())),
                "comes from registry+elsewhere",
            ),
            (
                package(|package| package.source = Some("git+elsewhere".into())),
                "comes from git+elsewhere",
            ),
            (
                package(|package| package.dependencies.push(any_version(None, None))),
                "any version of b",
            ),
            (
                package(|package| package.dependencies.push(any_version(Some("/x"), None))),
                "any version of b",
            ),
        ] {
            let wrong = rules.judge(&bad);
            assert!(
                wrong.len() == 1 && wrong[0].starts_with("a 1.0.0 ") && wrong[0].contains(word),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn rules_that_are_not_checked_here_are_errors() {
        let more = format!("{TEXT}\n[advisories]\nignore = []\n");
        assert!(Rules::parse(&more).is_err());
        assert!(Rules::parse(&TEXT.replace("wildcards = \"deny\"", "wildcards = \"warn\"")).is_err());
        assert!(Rules::parse(&TEXT.replace("[licenses]\n", "[licenses]\nexceptions = []\n")).is_err());
    }

    #[test]
    fn second_versions_are_told_and_other_targets_left_out() {
        let one = |version: &str, id: &str| serde_json::json!({"name": "a", "version": version, "id": id, "license": "MIT", "source": null, "dependencies": []});
        let metadata = serde_json::json!({
            "packages": [one("1.0.0", "x"), one("2.0.0", "y"), one("3.0.0", "z")],
            "resolve": {"nodes": [{"id": "x"}, {"id": "y"}]},
        });
        let packages = packages(&metadata).unwrap();
        assert_eq!(packages.len(), 2);
        assert_eq!(with_more_versions(&packages).into_iter().collect::<Vec<_>>(), ["a"]);
    }
}
