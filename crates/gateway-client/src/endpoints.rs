//! The endpoints of the REST API, one function each.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use ureq::http::Method;

use crate::client::{Reached, escape};
use crate::error::plain;
use crate::{
    Access, Client, Error, ListedSandbox, LogEntry, Metric, NetworkRules, NewSandbox, Snapshot, Template, Volume,
};

impl Client {
    /// Makes a sandbox.
    ///
    /// # Errors
    /// It was not made.
    pub fn create(&self, sandbox: &NewSandbox) -> Result<Access, Error> {
        let body = serde_json::to_value(sandbox).map_err(|error| self.server.no_gateway(error.to_string()))?;
        self.post("/v2/sandboxes", &body).map(|reached| self.access(reached))
    }

    /// A sandbox that is there, and how it is reached.
    ///
    /// # Errors
    /// It is not there, or cannot be asked for.
    pub fn sandbox(&self, id: &str) -> Result<(ListedSandbox, Access), Error> {
        let told: Value = self.get(&format!("/sandboxes/{}", escape(id)))?;
        let bad = |error: serde_json::Error| self.server.no_gateway(plain(&error.to_string()));
        let reached = Reached::deserialize(&told).map_err(bad)?;
        let listed = ListedSandbox::deserialize(&told).map_err(bad)?;
        Ok((listed, self.access(reached)))
    }

    /// The sandboxes with all of this metadata, in any of these states: `running`, `paused`.
    ///
    /// # Errors
    /// They cannot be asked for.
    pub fn sandboxes(&self, metadata: &[(String, String)], states: &[&str]) -> Result<Vec<ListedSandbox>, Error> {
        let pairs: Vec<String> = metadata
            .iter()
            .map(|(key, value)| format!("{}={}", escape(key), escape(value)))
            .collect();
        let mut query = format!("&state={}", escape(&states.join(",")));
        if !pairs.is_empty() {
            query += &format!("&metadata={}", escape(&pairs.join("&")));
        }
        self.pages("/v2/sandboxes", &query)
    }

    /// Kills a sandbox: nothing stays of it.
    ///
    /// # Errors
    /// It was not there, or was not killed.
    pub fn kill(&self, id: &str) -> Result<(), Error> {
        self.ask(Method::DELETE, &format!("/sandboxes/{}", escape(id)), None)
            .map(drop)
    }

    /// Has a sandbox end after so many seconds from now on.
    ///
    /// # Errors
    /// It was not there, or may not run so long.
    pub fn set_timeout(&self, id: &str, seconds: u64) -> Result<(), Error> {
        let path = format!("/sandboxes/{}/timeout", escape(id));
        self.ask(Method::POST, &path, Some(&json!({ "timeout": seconds })))
            .map(drop)
    }

    /// Saves a sandbox's memory and ends its machine.
    ///
    /// # Errors
    /// It was not there, or was not paused.
    pub fn pause(&self, id: &str) -> Result<(), Error> {
        self.ask(
            Method::POST,
            &format!("/sandboxes/{}/pause", escape(id)),
            Some(&json!({})),
        )
        .map(drop)
    }

    /// Lets a paused sandbox go on, for so many seconds.
    ///
    /// # Errors
    /// It was not there, or does not go on.
    pub fn resume(&self, id: &str, seconds: u64) -> Result<(), Error> {
        let path = format!("/sandboxes/{}/resume", escape(id));
        self.ask(Method::POST, &path, Some(&json!({ "timeout": seconds })))
            .map(drop)
    }

    /// Puts rules in place of those of a sandbox's network.
    ///
    /// # Errors
    /// They were not taken.
    pub fn set_network(&self, id: &str, rules: &NetworkRules) -> Result<(), Error> {
        let body = json!({ "allowOut": rules.allow_out, "denyOut": rules.deny_out });
        self.ask(Method::PUT, &format!("/sandboxes/{}/network", escape(id)), Some(&body))
            .map(drop)
    }

    /// Keeps a sandbox as it is now.
    ///
    /// # Errors
    /// It was not kept.
    pub fn snapshot(&self, id: &str, name: Option<&str>) -> Result<Snapshot, Error> {
        let body = name.map_or_else(|| json!({}), |name| json!({ "name": name }));
        self.post(&format!("/sandboxes/{}/snapshots", escape(id)), &body)
    }

    /// All snapshots.
    ///
    /// # Errors
    /// They cannot be asked for.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, Error> {
        self.pages("/snapshots", "")
    }

    /// All templates.
    ///
    /// # Errors
    /// They cannot be asked for.
    pub fn templates(&self) -> Result<Vec<Template>, Error> {
        self.get("/templates")
    }

    /// Removes a template or a snapshot.
    ///
    /// # Errors
    /// It was not there, or may not be removed.
    pub fn remove_template(&self, id: &str) -> Result<(), Error> {
        self.ask(Method::DELETE, &format!("/templates/{}", escape(id)), None)
            .map(drop)
    }

    /// All volumes.
    ///
    /// # Errors
    /// They cannot be asked for.
    pub fn volumes(&self) -> Result<Vec<Volume>, Error> {
        self.get("/volumes")
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// It was not made.
    pub fn create_volume(&self, name: &str) -> Result<Volume, Error> {
        self.post("/volumes", &json!({ "name": name }))
    }

    /// Removes a volume.
    ///
    /// # Errors
    /// It was not there, or a sandbox has it.
    pub fn remove_volume(&self, id: &str) -> Result<(), Error> {
        self.ask(Method::DELETE, &format!("/volumes/{}", escape(id)), None)
            .map(drop)
    }

    /// What sandboxes use that run, by their ids.
    ///
    /// # Errors
    /// It cannot be asked for.
    pub fn metrics(&self, ids: &[&str]) -> Result<BTreeMap<String, Metric>, Error> {
        #[derive(Deserialize)]
        struct Metrics {
            sandboxes: BTreeMap<String, Metric>,
        }
        let mut all = BTreeMap::new();
        // More are not asked for at once.
        for some in ids.chunks(100) {
            let path = format!("/sandboxes/metrics?sandbox_ids={}", escape(&some.join(",")));
            all.append(&mut self.get::<Metrics>(&path)?.sandboxes);
        }
        Ok(all)
    }

    /// Lines of a sandbox's log, from this moment on (milliseconds since 1970), the oldest first.
    ///
    /// # Errors
    /// They cannot be asked for.
    pub fn logs(&self, id: &str, from_ms: u64) -> Result<Vec<LogEntry>, Error> {
        #[derive(Deserialize)]
        struct Logs {
            logs: Vec<LogEntry>,
        }
        let path = format!(
            "/v2/sandboxes/{}/logs?limit=1000&direction=forward&cursor={from_ms}",
            escape(id)
        );
        self.get::<Logs>(&path).map(|logs| logs.logs)
    }
}
