model_cmd="--model_name hunyuan_video --pretrained_model_name_or_path hunyuanvideo-community/HunyuanVideo"
data_cmd="--data_root d --video_column v.txt --caption_column c.txt --video_resolution_buckets 17x512x768 49x512x768"
train_cmd="--training_type lora --batch_size 1 --rank 64 --gradient_checkpointing --mixed_precision bf16 --optimizer adamw"
cmd="accelerate launch --num_processes 2 train.py $model_cmd $data_cmd $train_cmd"
eval $cmd
