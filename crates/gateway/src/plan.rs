//! What a new sandbox is to be: the request checked, and turned into what the node understands. Everything that is accepted is honoured;
//! what cannot be is refused with a sentence. Asks nobody.

use std::collections::BTreeMap;

use base::Egress;
use node_api::{
    NetworkMode, OnTimeout, Paging, ProcessConfig, Resources, SandboxConfig, Template, TimeLimit, VolumeMount,
};

use crate::Error;
use crate::api::models::{Network, NewSandbox};
use crate::egress::{self, has, says};
use crate::labels::{Said, is_text};
use crate::volumes::mount;

/// The longest time that a sandbox may be given at once: 30 days.
const MAX_TIMEOUT: u64 = 30 * 24 * 3600;

/// The most keys of metadata, and the most variables.
const MAX_PAIRS: usize = 256;

/// The most bytes of metadata, and of variables: both fit into one packet to the node, with room for the rest.
const MAX_BYTES: usize = 48 << 10;

/// A sandbox that is to be made, whatever of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// How long it may run.
    pub(crate) limit: TimeLimit,
    /// `NAME=value`.
    pub(crate) env: Vec<String>,
    /// What it may reach, if anything is said of that.
    pub(crate) egress: Option<Egress>,
    /// Volumes of its tenant's.
    pub(crate) volumes: Vec<VolumeMount>,
    /// What is said of it; whose it is, and of what, is said later.
    pub(crate) said: Said,
}

impl Plan {
    /// What is asked for. `timeout` is for who says none, in seconds.
    pub(crate) fn of(asked: &NewSandbox, timeout: u64) -> Result<Self, Error> {
        refuse_unserved(asked)?;
        let auto_pause = asked.auto_pause.unwrap_or(false);
        let then = match auto_pause {
            true => OnTimeout::Suspend,
            false => OnTimeout::Stop,
        };
        let private_traffic = private_traffic(asked.network.as_ref())?;
        let metadata = asked.metadata.clone().unwrap_or_default();
        check_pairs("metadata", &metadata)?;
        let auto_resume = asked.auto_resume.as_ref().is_some_and(|resume| resume.enabled);
        Ok(Self {
            limit: TimeLimit {
                ms: milliseconds(asked.timeout.unwrap_or(timeout))?,
                then,
            },
            env: variables(asked.env_vars.clone().unwrap_or_default())?,
            egress: egress::of_new(asked.network.as_ref(), asked.allow_internet_access)?,
            volumes: (asked.volume_mounts.iter().flatten())
                .map(|one| mount(one.name.clone(), one.path.clone()))
                .collect(),
            said: Said {
                auto_resume,
                private_traffic,
                internet: asked.allow_internet_access,
                metadata,
                ..Said::default()
            },
        })
    }
}

/// Seconds that somebody has written, as the node counts. No time at all is a moment.
pub(crate) fn milliseconds(seconds: u64) -> Result<u64, Error> {
    match seconds <= MAX_TIMEOUT {
        true => Ok((seconds * 1000).max(1)),
        false => Err(Error::invalid(format!(
            "a timeout of {seconds} s is too long: give {MAX_TIMEOUT} at most"
        ))),
    }
}

/// Memory that is not to be kept cannot be left out.
pub(crate) fn require_memory(memory: Option<bool>, what: &str) -> Result<(), Error> {
    match memory {
        Some(false) => Err(Error::invalid(format!(
            "{what} without the sandbox's memory is not served by this version of Basalt: leave `memory` out"
        ))),
        _ => Ok(()),
    }
}

fn refuse_unserved(asked: &NewSandbox) -> Result<(), Error> {
    let unserved = |what: &str| {
        Err(Error::invalid(format!(
            "`{what}` is not served by this version of Basalt: leave it out"
        )))
    };
    if says(asked.mcp.as_ref()) {
        return unserved("mcp");
    }
    // An object without tokens asks for nothing.
    let tokens = asked.iam.as_ref().and_then(|iam| iam.get("tokens"));
    if says(tokens) {
        return unserved("iam");
    }
    // Otherwise nothing is paused by itself, and the field says nothing.
    if asked.auto_pause == Some(true) && asked.auto_pause_memory == Some(false) {
        return unserved("autoPauseMemory: false");
    }
    Ok(())
}

/// Whether its ports are to show a token; what cannot be done of the rules of a network is refused.
fn private_traffic(asked: Option<&Network>) -> Result<bool, Error> {
    let Some(asked) = asked else { return Ok(false) };
    egress::refuse_unserved(&[
        (has(asked.dns_servers.as_deref()), "dnsServers"),
        (says(asked.egress_proxy.as_ref()), "egressProxy"),
        (asked.mask_request_host.is_some(), "maskRequestHost"),
        (has(asked.https_ports.as_deref()), "httpsPorts"),
        (says(asked.rules.as_ref()), "rules"),
    ])?;
    Ok(asked.allow_public_traffic == Some(false))
}

fn check_pairs(what: &str, pairs: &BTreeMap<String, String>) -> Result<(), Error> {
    // As they go to the node, where a character may take six bytes.
    let bytes = serde_json::to_string(pairs).map_or(usize::MAX, |text| text.len());
    if pairs.len() > MAX_PAIRS || bytes > MAX_BYTES {
        return Err(Error::invalid(format!(
            "`{what}` has {} entries of {bytes} bytes, and may have {MAX_PAIRS} of {MAX_BYTES}",
            pairs.len()
        )));
    }
    let bad = |(key, value): &(&String, &String)| key.is_empty() || !is_text(key) || !is_text(value);
    match pairs.iter().find(bad) {
        Some((key, _)) => Err(Error::invalid(format!(
            "`{what}` has the key {key:?}: keys are not empty, and there is no zero character in keys and values"
        ))),
        None => Ok(()),
    }
}

fn variables(pairs: BTreeMap<String, String>) -> Result<Vec<String>, Error> {
    check_pairs("envVars", &pairs)?;
    if let Some(name) = pairs.keys().find(|name| name.contains('=')) {
        return Err(Error::invalid(format!(
            "{name:?} cannot be the name of an environment variable"
        )));
    }
    Ok(pairs
        .into_iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect())
}

/// The one place that says how a sandbox of a template is made for a tenant.
pub(crate) fn sandbox_config(template: &Template, plan: &Plan, said: &Said) -> SandboxConfig {
    let mut config = on_template(template, plan.limit, said);
    // What comes later counts.
    config.process.env.extend(plan.env.clone());
    config.egress = plan.egress.clone().unwrap_or_default();
    config.volumes.clone_from(&plan.volumes);
    config
}

/// One of a template, as that is.
pub(crate) fn on_template(template: &Template, limit: TimeLimit, said: &Said) -> SandboxConfig {
    let bare = on_image(&template.digest, template.resources.clone(), limit, said);
    let recipe = template.recipe.clone().unwrap_or_default();
    SandboxConfig {
        process: ProcessConfig {
            env: recipe.env,
            workdir: recipe.workdir,
            user: recipe.user,
            ..bare.process
        },
        template: Some(template.id.clone()),
        ..bare
    }
}

/// One of an image. It has no command of its own.
pub(crate) fn on_image(image: &str, resources: Resources, limit: TimeLimit, said: &Said) -> SandboxConfig {
    SandboxConfig {
        name: None,
        image: image.to_owned(),
        process: ProcessConfig {
            idle: true,
            ..ProcessConfig::default()
        },
        resources,
        limits: node_api::Limits::default(),
        tmpfs: Vec::new(),
        network: NetworkMode::Auto,
        egress: Egress::default(),
        ports: Vec::new(),
        volumes: Vec::new(),
        devices: Vec::new(),
        cdi_devices: Vec::new(),
        device_start: None,
        accelerator: None,
        memory_ready: false,
        hostname: None,
        boot: false,
        template: None,
        paging: Paging::default(),
        time_limit: Some(limit),
        remove: true,
        detach: true,
        labels: said.write(),
        // The node knows who asks.
        owner: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn plan(mut asked: Value) -> Result<Plan, Error> {
        asked["templateID"] = json!("base");
        Plan::of(&serde_json::from_value(asked).unwrap(), 15)
    }

    fn refusal(asked: Value) -> String {
        let error = plan(asked).unwrap_err();
        assert_eq!(error.status(), 400);
        error.to_string()
    }

    #[test]
    fn what_is_asked_for_is_what_it_is() {
        let least = plan(json!({})).unwrap();
        assert_eq!((least.limit.ms, least.limit.then), (15_000, OnTimeout::Stop));
        assert!(least.egress.is_none() && least.env.is_empty());
        assert_eq!(least.said, Said::default());
        let most = plan(json!({
            "timeout": 60, "autoPause": true, "autoPauseMemory": true, "autoResume": {"enabled": true},
            "allow_internet_access": false, "network": {"allowPublicTraffic": false}, "metadata": {"k": "v"},
            "envVars": {"A": "b=c"}, "secure": false, "mcp": null, "iam": {}, "volumeMounts": [], "other": [1],
        }))
        .unwrap();
        assert_eq!((most.limit.ms, most.limit.then), (60_000, OnTimeout::Suspend));
        assert!(most.egress.unwrap().is_nothing());
        assert!(most.said.auto_resume && most.said.private_traffic);
        assert_eq!(most.said.internet, Some(false));
        assert_eq!(
            (most.env, most.said.metadata["k"].as_str()),
            (vec!["A=b=c".to_owned()], "v")
        );
        let denied = plan(json!({"network": {"denyOut": ["0.0.0.0/0"]}})).unwrap();
        assert!(denied.egress.unwrap().is_nothing());
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (asked, name) in [
            (json!({"mcp": {"x": {}}}), "`mcp`"),
            (json!({"iam": {"tokens": {"a": {}}}}), "`iam`"),
            (json!({"autoPause": true, "autoPauseMemory": false}), "autoPauseMemory"),
            (json!({"network": {"allowOut": ["example.com"]}}), "network.allowOut"),
            (json!({"network": {"denyOut": ["1.1.1"]}}), "network.denyOut"),
            (json!({"network": {"dnsServers": ["1.1.1.1"]}}), "network.dnsServers"),
            (
                json!({"network": {"egressProxy": {"address": "a:1"}}}),
                "network.egressProxy",
            ),
            (json!({"network": {"maskRequestHost": "a"}}), "network.maskRequestHost"),
            (json!({"network": {"httpsPorts": [443]}}), "network.httpsPorts"),
            (json!({"network": {"rules": {"a": []}}}), "network.rules"),
        ] {
            let refusal = refusal(asked);
            assert!(refusal.contains(name), "{name}: {refusal}");
        }
        assert!(
            plan(json!({"autoPauseMemory": false})).is_ok(),
            "nothing is paused by itself"
        );
        assert!(plan(json!({"network": {"allowOut": [], "rules": {}}})).is_ok());
    }

    #[test]
    fn sizes_are_bounded() {
        assert!(refusal(json!({"timeout": 10_000_000})).contains("2592000"));
        assert_eq!(milliseconds(0).unwrap(), 1);
        assert!(refusal(json!({"metadata": {"k": "v".repeat(MAX_BYTES)}})).contains("metadata"));
        let many: BTreeMap<String, String> = (0..=MAX_PAIRS).map(|n| (format!("K{n}"), String::new())).collect();
        assert!(refusal(json!({"envVars": many})).contains("257 entries"));
        assert!(refusal(json!({"envVars": {"A=B": "c"}})).contains("A=B"));
        assert!(refusal(json!({"metadata": {"": "c"}})).contains("metadata"));
        assert!(refusal(json!({"metadata": {"a": "\u{0}"}})).contains("zero character"));
    }
}
