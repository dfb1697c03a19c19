//! Endpoints of the tag `templates`: list, look at, remove. Templates are the node's, built by its operator (`basalt template build`), and
//! are there for all tenants.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use node_api::list::Place;
use node_api::{Request, Template as NodeTemplate};
use serde::Serialize;
use utoipa::ToSchema;

use super::extract::{Name, Query};
use super::failures::Failures;
use super::models::PageQuery;
use super::{page, snapshots};
use crate::Error;
use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::origin::Origin;
use crate::time_text;

/// A template.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Template {
    /// Its id.
    #[serde(rename = "templateID")]
    template_id: String,
    /// Its build's; it has one.
    #[serde(rename = "buildID")]
    build_id: String,
    /// Virtual CPUs.
    cpu_count: u32,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    /// MiB of the disk.
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    /// All tenants can use it.
    public: bool,
    /// What it is called.
    aliases: Vec<String>,
    /// The same.
    names: Vec<String>,
    /// When it was built.
    #[schema(format = DateTime)]
    created_at: String,
    /// The same.
    #[schema(format = DateTime)]
    updated_at: String,
    /// Nobody whom tenants know.
    #[schema(value_type = Option<Object>, required)]
    created_by: Option<()>,
    /// When a sandbox was last made of it.
    #[schema(format = DateTime, required)]
    last_spawned_at: Option<String>,
    /// Not counted.
    spawn_count: u64,
    /// It has one.
    build_count: u64,
    /// The version of envd whose features its sandboxes have.
    envd_version: String,
    /// `ready`, or `error` if no sandbox can be made of it now.
    build_status: &'static str,
}

/// A template with its build.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TemplateWithBuilds {
    /// The template.
    #[serde(flatten)]
    template: Template,
    /// Its build.
    builds: Vec<Build>,
}

/// How a template came to be.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Build {
    /// A UUID, which follows from the template's id.
    #[serde(rename = "buildID")]
    build_id: String,
    /// `ready` or `error`.
    status: &'static str,
    /// When it was built.
    #[schema(format = DateTime)]
    created_at: String,
    /// The same.
    #[schema(format = DateTime)]
    updated_at: String,
    /// The same.
    #[schema(format = DateTime)]
    finished_at: String,
    /// Virtual CPUs.
    cpu_count: u32,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
}

/// What a name stands for.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AliasTarget {
    /// The template's id.
    #[serde(rename = "templateID")]
    template_id: String,
    /// All tenants can use it.
    public: bool,
}

/// A UUID of the first digits of an id: clients want one.
fn uuid(id: &str) -> String {
    let digits: String = id.chars().chain(std::iter::repeat('0')).take(32).collect();
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default();
    [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
}

impl Template {
    fn of(gateway: &Gateway, template: &NodeTemplate, own: &BTreeMap<String, Vec<String>>) -> Self {
        let mut names = template.names.clone();
        names.extend(own.get(&template.id).cloned().unwrap_or_default());
        names.dedup();
        let created = time_text::text(template.created_ns);
        let resources = &template.resources;
        Self {
            template_id: template.id.clone(),
            build_id: uuid(&template.id),
            cpu_count: resources.cpus,
            memory_mb: resources.memory.bytes() >> 20,
            disk_size_mb: resources.disk.map_or(0, |disk| disk.bytes() >> 20),
            public: true,
            aliases: names.clone(),
            names,
            created_at: created.clone(),
            updated_at: created,
            created_by: None,
            last_spawned_at: (template.used_ns > template.created_ns).then(|| time_text::text(template.used_ns)),
            spawn_count: 0,
            build_count: 1,
            envd_version: gateway.envd.version().to_owned(),
            build_status: status(template),
        }
    }
}

fn status(template: &NodeTemplate) -> &'static str {
    match template.outdated {
        None => "ready",
        Some(_) => "error",
    }
}

/// Those that somebody has built; others the node makes for itself.
async fn built(gateway: &Gateway, principal: &Principal) -> Result<Vec<NodeTemplate>, Error> {
    let mut all = gateway.nodes.templates(&principal.owner()).await?;
    all.retain(|template| template.recipe.is_some() && !template.sized);
    all.sort_by_key(|template| std::cmp::Reverse(place(template)));
    Ok(all)
}

fn place(template: &NodeTemplate) -> Place {
    Place {
        created_ns: template.created_ns,
        id: template.id.clone(),
    }
}

/// List templates, the newest first.
#[utoipa::path(get, path = "/templates", tag = "templates", responses((status = 200, body = [Template]), Failures))]
pub(crate) async fn list(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
) -> Result<Json<Vec<Template>>, Error> {
    let own = snapshots::names(&gateway, &principal).await?;
    let all = built(&gateway, &principal).await?;
    Ok(Json(all.iter().map(|one| Template::of(&gateway, one, &own)).collect()))
}

/// List templates by pages, the newest first.
#[utoipa::path(get, path = "/v2/templates", tag = "templates", params(PageQuery),
    responses((status = 200, body = [Template], headers(("x-next-token" = String, description = "Of the next page, if there is one"))), Failures))]
pub(crate) async fn list_v2(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Query(query): Query<PageQuery>,
) -> Result<Response, Error> {
    let limit = page::limit(query.limit)?;
    let after = page::parse(query.next_token.as_deref())?;
    let own = snapshots::names(&gateway, &principal).await?;
    let mut all = built(&gateway, &principal).await?;
    all.retain(|template| after.as_ref().is_none_or(|after| place(template) < *after));
    let is_cut = all.len() > limit;
    all.truncate(limit);
    let shown: Vec<Template> = all.iter().map(|one| Template::of(&gateway, one, &own)).collect();
    let mut response = Json(shown).into_response();
    if let Some(token) = all.last().filter(|_| is_cut).map(place).as_ref().and_then(page::header) {
        response.headers_mut().insert(page::NEXT_TOKEN, token);
    }
    Ok(response)
}

/// Look at a template.
#[utoipa::path(get, path = "/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    responses((status = 200, body = TemplateWithBuilds), Failures))]
pub(crate) async fn get(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<Json<TemplateWithBuilds>, Error> {
    let Origin::Template(found) = gateway.find(&principal, &name).await?.origin else {
        return Err(Error::NotFound { what: "template", name });
    };
    let own = snapshots::names(&gateway, &principal).await?;
    let template = Template::of(&gateway, &found, &own);
    let build = Build {
        build_id: template.build_id.clone(),
        status: template.build_status,
        created_at: template.created_at.clone(),
        updated_at: template.updated_at.clone(),
        finished_at: template.created_at.clone(),
        cpu_count: template.cpu_count,
        memory_mb: template.memory_mb,
    };
    Ok(Json(TemplateWithBuilds {
        template,
        builds: vec![build],
    }))
}

/// What a name stands for.
#[utoipa::path(get, path = "/templates/aliases/{alias}", tag = "templates", params(("alias" = String, Path)),
    responses((status = 200, body = AliasTarget), Failures))]
pub(crate) async fn alias(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<Json<AliasTarget>, Error> {
    let found = gateway.find(&principal, &name).await?;
    Ok(Json(AliasTarget {
        template_id: found.origin.id().to_owned(),
        public: matches!(found.origin, Origin::Template(_)),
    }))
}

/// Remove a snapshot. Sandboxes that were made of it run on. Templates are the operator's to remove.
#[utoipa::path(delete, path = "/templates/{templateID}", tag = "templates", params(("templateID" = String, Path)),
    responses((status = 204), (status = 403, body = crate::error::ErrorBody), Failures))]
pub(crate) async fn remove(
    Shared(gateway): Shared<Arc<Gateway>>,
    principal: Principal,
    Name(name): Name,
) -> Result<StatusCode, Error> {
    let snapshot = match gateway.find(&principal, &name).await?.origin {
        Origin::Snapshot(snapshot) => snapshot.name,
        Origin::Template(template) => {
            return Err(Error::Forbidden(format!(
                "template `{}` is there for all tenants of this node: its operator removes it, with `basalt template rm`",
                template.name()
            )));
        }
    };
    let request = Request::RemoveSnapshot { name: snapshot.clone() };
    gateway.nodes.done(&principal.owner(), request).await?;
    let tenant = Arc::clone(&principal.tenant);
    gateway
        .store
        .with(move |store| store.forget_target(&tenant, &snapshot))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_a_uuid() {
        assert_eq!(
            uuid(&"0123456789abcdef".repeat(4)),
            "01234567-89ab-cdef-0123-456789abcdef"
        );
        assert_eq!(uuid("ab"), "ab000000-0000-0000-0000-000000000000");
    }
}
