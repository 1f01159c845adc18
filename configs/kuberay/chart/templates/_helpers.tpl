{{/* Values that contradict each other stop the rendering here; the schema has checked each by itself. */}}
{{- define "rayapp.check" -}}
{{- if and (eq .Values.image.tag "latest") (not .Values.image.digest) -}}
{{- fail "image.tag is latest: name a version or a digest, so that a pod that restarts runs the same code" -}}
{{- end -}}
{{- if and (eq .Values.layout "head-worker") (gt (int .Values.head.gpus) 0) -}}
{{- fail (printf "head.gpus is %d, but layout head-worker has its GPUs in the workers: set head.gpus=0, or layout=single-node" (int .Values.head.gpus)) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (eq .Values.layout "single-node") -}}
{{- fail "autoscaling.enabled needs layout=head-worker: a single node has no workers to add" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (eq .Values.queue.kind "kueue") -}}
{{- fail "autoscaling.enabled and queue.kind=kueue contradict each other: Kueue admits a cluster of a fixed size. Turn one off" -}}
{{- end -}}
{{- if and .Values.network.host (eq .Values.layout "single-node") -}}
{{- fail "network.host is for several nodes: with layout=single-node nothing leaves the node. Use layout=head-worker" -}}
{{- end -}}
{{- if and .Values.network.host .Values.networkPolicy.enabled (not .Values.networkPolicy.nodeCidrs) -}}
{{- fail "network.host puts pods on the nodes' network, where a NetworkPolicy does not know them: set networkPolicy.nodeCidrs to the nodes' addresses, or networkPolicy.enabled=false" -}}
{{- end -}}
{{- if and (ne .Values.queue.kind "none") (not .Values.queue.name) -}}
{{- fail (printf "queue.kind is %s, but queue.name is empty: name the queue" .Values.queue.kind) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.workers.minReplicas) (int .Values.workers.maxReplicas)) -}}
{{- fail (printf "workers.minReplicas %d is above workers.maxReplicas %d" (int .Values.workers.minReplicas) (int .Values.workers.maxReplicas)) -}}
{{- end -}}
{{- if and (eq .Values.layout "head-worker") (or (lt (int .Values.workers.replicas) (int .Values.workers.minReplicas)) (gt (int .Values.workers.replicas) (int .Values.workers.maxReplicas))) -}}
{{- fail (printf "workers.replicas %d is not between workers.minReplicas %d and workers.maxReplicas %d" (int .Values.workers.replicas) (int .Values.workers.minReplicas) (int .Values.workers.maxReplicas)) -}}
{{- end -}}
{{- if and .Values.dataset.enabled (eq .Values.storage.data.kind "none") -}}
{{- fail "dataset.enabled needs a place to write to: set storage.data.kind" -}}
{{- end -}}
{{- range $name := list "models" "data" -}}
{{- $volume := index $.Values.storage $name -}}
{{- if and (eq $volume.kind "claim") (not $volume.claimName) -}}
{{- fail (printf "storage.%s.kind is claim, but storage.%s.claimName is empty" $name $name) -}}
{{- end -}}
{{- if and (has $volume.kind (list "ossfs" "s3")) (or (not $volume.bucket) (not $volume.endpoint)) -}}
{{- fail (printf "storage.%s.kind is %s: set storage.%s.bucket and storage.%s.endpoint" $name $volume.kind $name $name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.secrets.create (not .Values.secrets.data) -}}
{{- fail "secrets.create is true, but secrets.data is empty" -}}
{{- end -}}
{{- if and (not .Values.storage.outputs.create) (not .Values.storage.outputs.claimName) -}}
{{- fail "storage.outputs: set create=true, or claimName to a claim that exists; run folders must outlive the pods" -}}
{{- end -}}
{{- end -}}

{{- define "rayapp.labels" -}}
app.kubernetes.io/name: rayapp
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: rayapp
{{- end -}}

{{- define "rayapp.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "rayapp.outputsClaim" -}}
{{- .Values.storage.outputs.claimName | default (printf "%s-outputs" .Release.Name) -}}
{{- end -}}

{{/* Name of a volume's claim. Argument: dict with root, name (models or data). */}}
{{- define "rayapp.claim" -}}
{{- $volume := index .root.Values.storage .name -}}
{{- if eq $volume.kind "claim" -}}{{ $volume.claimName }}{{- else -}}{{ printf "%s-%s" .root.Release.Name .name }}{{- end -}}
{{- end -}}

{{/* Folder or URL that the dataset Job writes to. A bucket is written through its own API: mounted as a folder it has no links and no renames. */}}
{{- define "rayapp.dataTarget" -}}
{{- $volume := .Values.storage.data -}}
{{- if has $volume.kind (list "ossfs" "s3") -}}{{ printf "s3://%s/%s" $volume.bucket (trimAll "/" $volume.path) | trimSuffix "/" }}{{- else -}}{{ $volume.mountPath }}{{- end -}}
{{- end -}}

{{/* One environment variable from the run's Secret, if the Secret has the key. Argument: dict with root, name, key. */}}
{{- define "rayapp.secretEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.secrets.name }}
      key: {{ .key }}
      optional: true
{{- end -}}

{{/* Number of GPUs once every pod runs. */}}
{{- define "rayapp.gpus" -}}
{{- if eq .Values.layout "single-node" -}}{{ .Values.head.gpus }}{{- else -}}{{ mul .Values.workers.replicas .Values.workers.gpus }}{{- end -}}
{{- end -}}

{{/* Pod template of a Ray pod. Argument: dict with root, group (head or workers), containerName. */}}
{{- define "rayapp.pod" -}}
{{- $values := .root.Values -}}
{{- $group := index $values .group -}}
metadata:
  labels:
    # KubeRay sets app.kubernetes.io/* of pods itself.
    rayapp.dev/run: {{ .root.Release.Name }}
    {{- if eq $values.queue.kind "volcano" }}
    volcano.sh/queue-name: {{ $values.queue.name }}
    {{- end }}
spec:
  # The RayJob starts a new cluster instead; a restarted head would have forgotten its run.
  restartPolicy: Never
  {{- if and $values.network.host (gt (int $group.gpus) 0) }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  terminationGracePeriodSeconds: {{ add $values.run.stopGraceSeconds 60 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if not $values.isolation.hostUsers }}
  hostUsers: false
  {{- end }}
  securityContext:
    # The image's user; it must be able to write the run folder.
    runAsNonRoot: true
    {{- with $values.isolation.seccompProfile }}
    seccompProfile:
      type: Localhost
      localhostProfile: {{ . }}
    {{- end }}
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
  # No token: the run calls no Kubernetes API, and model-written code may run in these pods. Autoscaling needs one in the head.
  automountServiceAccountToken: {{ and $values.autoscaling.enabled (eq .group "head") }}
  containers:
    # Ray's container must be the first.
    - name: {{ .containerName }}
      image: {{ include "rayapp.image" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      envFrom:
        - secretRef:
            name: {{ $values.secrets.name }}
      {{- if and $values.network.nccl (gt (int $group.gpus) 0) }}
      env:
        {{- range $name, $value := $values.network.nccl }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      {{- end }}
      resources:
        # Requests equal limits: a learner that is throttled or evicted stops all the others.
        {{- range $key := list "requests" "limits" }}
        {{ $key }}:
          cpu: {{ $group.cpu | quote }}
          memory: {{ $group.memory }}
          {{- if gt (int $group.gpus) 0 }}
          nvidia.com/gpu: {{ $group.gpus | quote }}
          {{- with $values.network.rdmaResource }}
          {{ . }}: {{ $values.network.rdmaCount | quote }}
          {{- end }}
          {{- end }}
        {{- end }}
      {{- if eq .group "head" }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: metrics, containerPort: 8080}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
      lifecycle:
        preStop:
          exec:
            # When the pod is evicted or preempted, the run first saves a checkpoint and releases its sandboxes.
            command:
              - python
              - -c
              - |
                import sys, time
                from ray.job_submission import JobSubmissionClient
                ray, end = JobSubmissionClient("http://127.0.0.1:8265"), time.monotonic() + float(sys.argv[1])
                jobs = [job.submission_id for job in ray.list_jobs() if not job.status.is_terminal()]
                for job in jobs: ray.stop_job(job)
                while time.monotonic() < end and not all(ray.get_job_status(job).is_terminal() for job in jobs): time.sleep(1)
              - {{ $values.run.stopGraceSeconds | quote }}
      {{- else }}
      ports:
        - {name: metrics, containerPort: 8080}
      {{- end }}
      volumeMounts:
        - {name: config, mountPath: /var/configs, readOnly: true}
        - {name: outputs, mountPath: {{ $values.storage.outputs.mountPath }}}
        {{- range $name := list "models" "data" }}
        {{- $volume := index $values.storage $name }}
        {{- if ne $volume.kind "none" }}
        - {name: {{ $name }}, mountPath: {{ $volume.mountPath }}, readOnly: true}
        {{- end }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ .root.Release.Name }}-config
    - name: outputs
      persistentVolumeClaim:
        claimName: {{ include "rayapp.outputsClaim" .root }}
    {{- range $name := list "models" "data" }}
    {{- if ne (index $values.storage $name).kind "none" }}
    - name: {{ $name }}
      persistentVolumeClaim:
        claimName: {{ include "rayapp.claim" (dict "root" $.root "name" $name) }}
    {{- end }}
    {{- end }}
{{- end -}}

{{/* KubeRay pastes this into a shell command as it is: plain words only, no quotes, no line breaks. */}}
{{- define "rayapp.entrypoint" -}}
{{- $words := list "python" "-m" "rayapp" "train" "/var/configs/run.yaml" -}}
{{- $words = append $words (printf "run.name=%s" .Release.Name) -}}
{{- $words = append $words (printf "run.output_dir=%s" .Values.storage.outputs.mountPath) -}}
{{- $words = append $words "cluster.address=auto" -}}
{{- $words = append $words (printf "cluster.num_gpus=%s" (include "rayapp.gpus" .)) -}}
{{- $words = append $words (printf "cluster.wait_for_gpus_s=%d" (int .Values.run.waitForGpusSeconds)) -}}
{{- with .Values.run.model -}}
{{- $words = append $words (printf "model.path=%s/%s" $.Values.storage.models.mountPath .) -}}
{{- end -}}
{{- range .Values.run.overrides -}}{{- $words = append $words . -}}{{- end -}}
{{- join " " $words -}}
{{- end -}}
