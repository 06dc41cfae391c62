BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE checkpoints (
	path VARCHAR NOT NULL, 
	model_id VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	lora JSON NOT NULL, 
	created_at BIGINT NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	directory VARCHAR NOT NULL, 
	step BIGINT NOT NULL, 
	public BOOLEAN NOT NULL, 
	expires_at BIGINT, 
	user_metadata JSON NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (path)
);
CREATE TABLE engines (
	base_model VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	updated_at BIGINT NOT NULL, 
	detail VARCHAR NOT NULL, 
	progress FLOAT, 
	engine_id VARCHAR, 
	pid INTEGER, 
	restarts INTEGER NOT NULL, 
	capabilities JSON, 
	CONSTRAINT pk_engines PRIMARY KEY (base_model)
);
CREATE TABLE operations (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	request_id VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	session_id VARCHAR NOT NULL, 
	stream VARCHAR NOT NULL, 
	seq_id BIGINT NOT NULL, 
	ordered BOOLEAN NOT NULL, 
	num_tokens BIGINT NOT NULL, 
	digest BLOB NOT NULL, 
	state VARCHAR NOT NULL, 
	created_at BIGINT NOT NULL, 
	started_at BIGINT, 
	finished_at BIGINT, 
	engine_id VARCHAR, 
	attempts INTEGER NOT NULL, 
	cancel_told BOOLEAN NOT NULL, 
	CONSTRAINT uq_operations_request_id UNIQUE (request_id), 
	CONSTRAINT uq_operations_stream_seq_id UNIQUE (stream, seq_id)
);
INSERT INTO "operations" VALUES(1,'req-0660c091c88d0f-b1ee92ff2fec354d3166c8ff','org/base-model','create_model','ann','s1','s1:train:0',0,1,0,X'6469676573742030','succeeded',1795230056090895,1795230056110839,1795230056116701,'engine-1',1,1);
INSERT INTO "operations" VALUES(2,'req-0660c091c90010-ecea6c17f1e0083bc7a6ebde','org/base-model','optim_step','ann','s1','s1:train:0',1,1,0,X'6469676573742031','succeeded',1795230056120336,1795230056134821,1795230056135703,'engine-1',1,1);
INSERT INTO "operations" VALUES(3,'req-0660c091c94278-341dda305ee19898210628c3','org/base-model','optim_step','ann','s1','s1:train:0',2,1,0,X'6469676573742032','running',1795230056137336,1795230056142240,NULL,'engine-1',1,1);
INSERT INTO "operations" VALUES(4,'req-0660c091c958d0-b0936354d7ab9177232ca582','org/base-model','optim_step','ann','s1','s1:train:0',3,1,0,X'6469676573742033','queued',1795230056143056,NULL,NULL,NULL,0,1);
CREATE TABLE payloads (
	operation_id INTEGER NOT NULL, 
	payload BLOB NOT NULL, 
	CONSTRAINT pk_payloads PRIMARY KEY (operation_id), 
	CONSTRAINT fk_payloads_operation_id FOREIGN KEY(operation_id) REFERENCES operations (id) ON DELETE CASCADE
);
INSERT INTO "payloads" VALUES(1,X'84A86D6F64656C5F6964AA73313A747261696E3A30A46C6F726186A472616E6B08A47365656407A5616C706861CB4040000000000000AA747261696E5F6174746EC3A9747261696E5F6D6C70C3AD747261696E5F756E656D626564C3AA636865636B706F696E74C0AE6C6F61645F6F7074696D697A6572C2');
INSERT INTO "payloads" VALUES(2,X'73313A747261696E3A302031');
INSERT INTO "payloads" VALUES(3,X'73313A747261696E3A302032');
INSERT INTO "payloads" VALUES(4,X'73313A747261696E3A302033');
CREATE TABLE results (
	operation_id INTEGER NOT NULL, 
	result_kind VARCHAR NOT NULL, 
	result BLOB NOT NULL, 
	CONSTRAINT pk_results PRIMARY KEY (operation_id), 
	CONSTRAINT fk_results_operation_id FOREIGN KEY(operation_id) REFERENCES operations (id) ON DELETE CASCADE
);
INSERT INTO "results" VALUES(1,'model_created',X'81A86D6F64656C5F6964AA73313A747261696E3A30');
INSERT INTO "results" VALUES(2,'optim_step_output',X'81A76D65747269637380');
CREATE TABLE retention (
	id INTEGER NOT NULL, 
	finished_before BIGINT NOT NULL, 
	CONSTRAINT pk_retention PRIMARY KEY (id)
);
CREATE TABLE runs (
	model_id VARCHAR NOT NULL, 
	session_id VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	lora JSON NOT NULL, 
	created_at BIGINT NOT NULL, 
	last_request_at BIGINT NOT NULL, 
	user_metadata JSON, 
	state VARCHAR NOT NULL, 
	state_reason VARCHAR, 
	next_seq_id BIGINT NOT NULL, 
	applied_seq_id BIGINT NOT NULL, 
	pruned_seq_id BIGINT NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY (model_id)
);
INSERT INTO "runs" VALUES('s1:train:0','s1','ann','org/base-model','{"rank": 8, "seed": 7, "alpha": 32.0, "train_attn": true, "train_mlp": true, "train_unembed": true}',1767323045678901,1795230056143056,NULL,'ready',NULL,3,1,-1);
CREATE TABLE samplers (
	sampling_session_id VARCHAR NOT NULL, 
	session_id VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	created_at BIGINT NOT NULL, 
	snapshot_id VARCHAR, 
	model_path VARCHAR, 
	model_id VARCHAR, 
	CONSTRAINT pk_samplers PRIMARY KEY (sampling_session_id)
);
CREATE TABLE sessions (
	session_id VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	idempotency_key VARCHAR, 
	created_at BIGINT NOT NULL, 
	last_seen_at BIGINT NOT NULL, 
	tags JSON NOT NULL, 
	user_metadata JSON, 
	sdk_version VARCHAR, 
	project_id VARCHAR, 
	display_name VARCHAR, 
	ended VARCHAR, 
	end_detail VARCHAR, 
	CONSTRAINT pk_sessions PRIMARY KEY (session_id), 
	CONSTRAINT uq_sessions_tenant_idempotency_key UNIQUE (tenant, idempotency_key)
);
INSERT INTO "sessions" VALUES('s1','ann','s1',1767323045678901,1767323045678901,'[]',NULL,NULL,NULL,NULL,NULL,NULL);
CREATE INDEX ix_checkpoints_created_at ON checkpoints (created_at);
CREATE INDEX ix_checkpoints_expires_at ON checkpoints (expires_at);
CREATE INDEX ix_checkpoints_model_id ON checkpoints (model_id);
CREATE INDEX ix_checkpoints_tenant ON checkpoints (tenant);
CREATE INDEX ix_operations_finished_at ON operations (finished_at);
CREATE INDEX ix_operations_queued ON operations (base_model, ordered, tenant, id) WHERE state = 'queued';
CREATE INDEX ix_operations_running ON operations (base_model, id) WHERE state = 'running';
CREATE INDEX ix_operations_untold ON operations (base_model) WHERE NOT cancel_told;
CREATE INDEX ix_runs_base_model ON runs (base_model);
CREATE INDEX ix_runs_created_at ON runs (created_at);
CREATE INDEX ix_runs_session_id ON runs (session_id);
CREATE INDEX ix_runs_tenant ON runs (tenant);
CREATE INDEX ix_samplers_session_id ON samplers (session_id);
CREATE INDEX ix_sessions_created_at ON sessions (created_at);
CREATE INDEX ix_sessions_last_seen_at ON sessions (last_seen_at);
CREATE INDEX ix_sessions_tenant ON sessions (tenant);
COMMIT;
